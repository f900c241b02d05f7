"""The file of counts and values that a collector keeps over a restart of the agent within one boot.

A small JSON file, replaced as a whole.

It is not synced to the disk. It holds only for the boot that wrote it, and within a boot a renamed
file is seen whole by whoever opens it next, whatever happened to its writer; after a power failure
the boot is another one, and what the file holds is not looked at. So there is no fsync. The file is
written by a child, as even without one a write can hang with its disk. The directory has to be a
local one.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from dshealthd.core import state_file
from dshealthd.core.host import read
from dshealthd.core.state_writer import LatestWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from dshealthd.core.collector import Metric

OTHER = "other"


class PersistentCounters:
    """Values by metric and labels, bounded in number.

    What comes beyond the limit is counted as the series "other".
    """

    def __init__(
        self, widths: Mapping[Metric, int], limit: int, fixed: Collection[Metric] = ()
    ) -> None:
        """`widths` is the number of labels that each metric is counted by, `limit` the most series
        of all of them.

        The limit is not for the metrics of `fixed`, whose label values the caller takes from a list
        of its own.
        """
        self._widths = widths
        self._names = {metric.name: metric for metric in widths}
        self._limit = limit
        self._fixed = fixed
        self._values: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self.changed = False
        """Whether there is something that `rows` has not given."""

    def __iter__(self) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        """Iterate over metric, labels and value."""
        return ((metric, labels, value) for (metric, labels), value in self._values.items())

    def count(self, metric: Metric, *labels: str) -> None:
        """Add one to a counter that outlives a restart of the agent."""
        key = self._key(metric, labels)
        self._values[key] = self._values.get(key, 0.0) + 1.0
        self.changed = True

    def put(self, value: float, metric: Metric, *labels: str) -> None:
        """Set one value beside the counters that outlive a restart of the agent."""
        self._values[self._key(metric, labels)] = value
        self.changed = True

    def clear(self) -> None:
        """Start all persistent counters afresh."""
        self._values.clear()
        self.changed = True

    def rows(self) -> list[list[Any]]:
        """Return all persistent counters for JSON."""
        self.changed = False
        return [[metric.name, list(labels), value] for metric, labels, value in self]

    def restore(self, rows: Any) -> None:
        """Take over the counters that `rows` gave once.

        ValueError, and nothing is taken over, if it makes no sense.
        """
        values = {}
        try:
            for name, labels, value in rows:
                metric = self._names[name]
                if len(labels) != self._widths[metric] or not all(
                    isinstance(label, str) for label in labels
                ):
                    message = f"{name} with the labels {labels}"
                    raise ValueError(message)
                if type(value) not in {int, float} or not 0 <= value < math.inf:
                    message = f"{name} is {value}"
                    raise ValueError(message)
                values[metric, tuple(labels)] = float(value)
        except (KeyError, TypeError, OverflowError) as error:
            message = f"{type(error).__name__}: {error}"
            raise ValueError(message) from error
        self._values = values

    def _key(self, metric: Metric, labels: tuple[str, ...]) -> tuple[Metric, tuple[str, ...]]:
        key = metric, labels
        if key in self._values or len(self._values) < self._limit or metric in self._fixed:
            return key
        return metric, ("",) * (len(labels) - 1) + (OTHER,)


class CounterFile:
    """The file of one collector."""

    def __init__(
        self, directory: Path, name: str, boot_id: str, read: Callable[[str], str] = read
    ) -> None:
        """Name the file after `name`; `boot_id` says for which boot its content holds.

        `read` returns the content of a file, OSError.
        """
        self._read = read
        self.place = f"{directory}/{name}.json"
        self._boot_id = boot_id
        self.writer = LatestWriter(self._replace, name)

    def load(self) -> dict[str, Any] | None:
        """Return the counters that this boot saved; None if it has not saved any yet.

        OSError or ValueError if the file cannot be understood.
        """
        try:
            document = json.loads(self._read(self.place))
        except FileNotFoundError:
            return None
        except RecursionError as error:
            message = f"{self.place} is nested too deep"
            raise ValueError(message) from error
        match document:
            case {"boot_id": str(boot_id)}:
                return document if boot_id == self._boot_id else None
        message = f"{self.place} names no boot"
        raise ValueError(message)

    def save(self, document: Mapping[str, Any]) -> None:
        """Replace the counters' file soon; the newest wins. OSError if that cannot even begin.

        What comes of it is in `writer`: the disk may hang.
        """
        self.writer.put(
            json.dumps({"boot_id": self._boot_id, **document}, separators=(",", ":")).encode()
        )

    def _replace(self, content: bytes) -> None:
        state_file.replace_in_child(self.place, content)
