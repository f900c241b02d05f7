"""A collector's file of counts and values, which survives restarts of the agent within one boot.

A small JSON file, replaced as a whole.

It is not synced to disk. It is valid only for the boot that wrote it, and within a boot every
reader sees a renamed file whole, whatever happened to its writer. After a power failure the boot
differs and the content is ignored. So there is no fsync. A child writes the file, as even without
fsync a write can hang with its disk. The directory must be local.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents, schema, state_file
from dshealthd.core.host import read
from dshealthd.core.state_writer import LatestWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from dshealthd.core.collector import Metric

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
        """Iterate over metric, labels and value."""
        return ((metric, labels, value) for (metric, labels), value in self._values.items())

    def count(self, metric: Metric, *labels: str, by: int = 1) -> None:
        """Add to a counter."""
        key = self._key(metric, labels)
        self._values[key] = self._values.get(key, 0.0) + by
        self.changed = True

    def put(self, value: float, metric: Metric, *labels: str) -> None:
        """Set a value."""
        self._values[self._key(metric, labels)] = value
        self.changed = True

    def clear(self) -> None:
        """Clear all counters and values."""
        self._values.clear()
        self.changed = True

    def rows(self) -> list[list[Any]]:
        """Return all counters and values for JSON."""
        self.changed = False
        return [[metric.name, list(labels), value] for metric, labels, value in self]

    def restore(self, rows: Any) -> None:
        """Restore the result of `rows`.

        If it is invalid, raise ValueError and restore nothing.
        """
        values = {}
        with schema.reading("counts"):
            for name, labels, value in rows:
                metric = self._names[name]
                if len(labels) != self._widths[metric] or not all(
                    isinstance(label, str) for label in labels
                ):
                    schema.misfit(name, f"has the labels {labels}")
                if type(value) not in {int, float} or not 0 <= value < math.inf:
                    schema.misfit(name, f"is {value}")
                values[metric, tuple(labels)] = float(value)
        self._values = values

    def _key(self, metric: Metric, labels: tuple[str, ...]) -> tuple[Metric, tuple[str, ...]]:
        key = metric, labels
        if key in self._values or metric in self._fixed:
            return key
        if sum(other not in self._fixed for other, _ in self._values) < self._limit:
            return key
        return metric, ("",) * (len(labels) - 1) + (OTHER,)


class CounterFile:
    """The file of one collector."""

    def __init__(
        self, directory: Path, name: str, boot_id: str, read: Callable[[str], str] = read
    ) -> None:
        """Name the file after `name`; its content is valid only for the boot `boot_id`.

        `read` returns the content of a file, or raises OSError.
        """
        self._read = read
        self.place = f"{directory}/{name}.json"
        self._boot_id = boot_id
        replace = functools.partial(state_file.replace_in_child, self.place)
        self.writer = LatestWriter(replace, name)

    def load(self) -> dict[str, Any] | None:
        """Return the document that this boot saved; None if it has not saved any yet.

        Raise OSError or ValueError if the file cannot be read.
        """
        try:
            text = self._read(self.place)
        except FileNotFoundError:
            return None
        match document := schema.document(text):
            case {"boot_id": str(boot_id)}:
                return document if boot_id == self._boot_id else None
        message = f"{self.place} does not name a boot"
        raise ValueError(message)

    def save(self, document: Mapping[str, Any]) -> None:
        """Queue a replacement of the file; the newest wins. Raise OSError if it cannot begin.

        `writer` has the outcome, as the disk may hang.
        """
        self.writer.put(
            documents.dumps({"boot_id": self._boot_id, **document}, separators=(",", ":")).encode()
        )
