"""The registry of what packages declare: collectors, each a module of `dshealthd.collectors`, and
sections of the configuration, each in the module `options` of its package.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import dshealthd
from dshealthd.core.collector import Collector, Metric
from dshealthd.core.options import Section

if TYPE_CHECKING:
    from types import ModuleType

SOURCE = Path(dshealthd.__file__).parent
COLLECTORS = "dshealthd.collectors"


def load(name: str) -> type[Collector]:
    """Import one collector's module and return its class."""
    module = importlib.import_module(f"{COLLECTORS}.{name}")
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
    return {metric.name: metric for metric in declared(module)}


def declared(*modules: ModuleType) -> Iterator[Metric]:
    """Yield the `Metric` constants of modules, in the order in which they are declared."""
    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, Metric))


@functools.cache
def all_collectors() -> Mapping[str, type[Collector]]:
    """Return all collectors by name.

    Raise ValueError if two declare the same metric, which is a defect.
    """
    found: dict[str, type[Collector]] = {}
    owners: dict[str, str] = {}
    for module in pkgutil.iter_modules([str(SOURCE / "collectors")]):  # by name
        found[module.name] = load(module.name)
        for metric in metrics(found[module.name]):
            if metric in owners:
                raise ValueError(
                    f"metric {metric} is declared by the collectors {owners[metric]} and "
                    f"{module.name}"
                )
            owners[metric] = module.name
    return found


def sections() -> Mapping[str, type[Section]]:
    """Return the sections that packages declare, by the package's name, which is the section's."""
    found: dict[str, type[Section]] = {}
    for file in sorted(SOURCE.glob("*/options.py")):
        name = file.parent.name
        module = importlib.import_module(f"dshealthd.{name}.options")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and Section in value.__bases__
                and value.__module__ == module.__name__
            ):
                found[name] = value
    return found


@functools.cache
def collectors_by_metric() -> Mapping[str, str]:
    """Return the collector of each metric, by name."""
    return {
        name: collector for collector, kind in all_collectors().items() for name in metrics(kind)
    }
