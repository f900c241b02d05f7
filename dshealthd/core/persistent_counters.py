"""A collector's counts and values, which survive restarts of the agent."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from dshealthd.core import schema

if TYPE_CHECKING:
    from dshealthd.core.collector import Metric

Row = tuple[str, tuple[str, ...], Annotated[float, schema.Number(0, sys.float_info.max)]]
"""A metric's name, labels and value."""
OTHER = "other"


class PersistentCounters:
    """Values by metric and labels, bounded in number.

    Series beyond the limit are counted as the series "other".
    """

    def __init__(
        self, widths: Mapping[Metric, int], limit: int, fixed: Collection[Metric] = ()
    ) -> None:
        """`widths` is the number of labels of each metric, `limit` the most series of all.

        Series of the metrics in `fixed` do not count: the caller bounds their label values.
        """
        self._widths = widths
        self._names = {metric.name: metric for metric in widths}
        self._limit = limit
        self._fixed = fixed
        self._values: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self.changed = False
        """Whether something changed since `rows` was called."""

    def __iter__(self) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        return ((metric, labels, value) for (metric, labels), value in self._values.items())

    def count(self, metric: Metric, *labels: str, by: int = 1) -> None:
        """Add to a persistent counter."""
        key = self._key(metric, labels)
        self._values[key] = self._values.get(key, 0.0) + by
        self.changed = True

    def put(self, value: float, metric: Metric, *labels: str) -> None:
        """Set a persistent value."""
        self._values[self._key(metric, labels)] = value
        self.changed = True

    def clear(self) -> None:
        """Clear all persistent counters and values."""
        self._values.clear()
        self.changed = True

    def rows(self) -> list[Row]:
        """Return all persistent counters and values, for a state file."""
        self.changed = False
        return [(metric.name, labels, value) for metric, labels, value in self]

    def restore(self, rows: list[Row]) -> None:
        """Restore the result of `rows`; if it is of other metrics, raise SchemaError."""
        values = {}
        for name, labels, value in rows:
            metric = self._names.get(name)
            if metric is None or len(labels) != self._widths[metric]:
                schema.misfit("counts", f"has {name} with the labels {labels}")
            values[metric, labels] = value
        self._values = values

    def _key(self, metric: Metric, labels: tuple[str, ...]) -> tuple[Metric, tuple[str, ...]]:
        key = metric, labels
        if key in self._values or metric in self._fixed:
            return key
        if sum(other not in self._fixed for other, _ in self._values) < self._limit:
            return key
        return metric, ("",) * (len(labels) - 1) + (OTHER,)
