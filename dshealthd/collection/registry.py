"""The registry of collectors: discovers the modules of `dshealthd.collectors`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from dshealthd import collectors
from dshealthd.core.collector import Collector, Metric

if TYPE_CHECKING:
    from collections.abc import Mapping


def load(name: str) -> type[Collector]:
    """Import one collector's module and return its class."""
    module = importlib.import_module(f"{collectors.__name__}.{name}")
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Collector)
        and value.__module__ == module.__name__
    )
    return found


def metrics(collector: type[Collector]) -> Mapping[str, Metric]:
    """Return a collector's `Metric` constants by metric name."""
    module = importlib.import_module(collector.__module__)
    return {value.name: value for value in vars(module).values() if isinstance(value, Metric)}


@functools.cache
def all_collectors() -> Mapping[str, type[Collector]]:
    """Return all collectors by name.

    Raise ValueError if two declare the same metric, which is a defect.
    """
    found: dict[str, type[Collector]] = {}
    owners: dict[str, str] = {}
    for module in sorted(pkgutil.iter_modules(collectors.__path__), key=lambda module: module.name):
        found[module.name] = load(module.name)
        for metric in metrics(found[module.name]):
            if metric in owners:
                message = f"metric {metric} is declared by the collectors {owners[metric]} and {module.name}"
                raise ValueError(message)
            owners[metric] = module.name
    return found
