"""The registry of the collectors: the modules of `dshealthd.collectors`, found by looking there."""

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
    """Import one collector's module for the registry and return its class."""
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
    """Return what a registered collector declares, by metric name: its `Metric` constants."""
    module = importlib.import_module(collector.__module__)
    return {value.name: value for value in vars(module).values() if isinstance(value, Metric)}


@functools.cache
def all_collectors() -> Mapping[str, type[Collector]]:
    """Return every collector of the registry by name.

    Two that declare the same metric are a defect, and ValueError.
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
