"""Maintenance of this node: planned work, until its end time or until it is cancelled.

Set by `dshealthd maintenance on`, or by Slurm's health check when an operator drains the node. Only
root and the agent's user can set it, because only they can write to `path.state`.
"""

from __future__ import annotations

from collections.abc import Iterator

from dshealthd.core.collector import (
    Collector,
    Fault,
    NotAvailable,
    Sample,
    SourceError,
    Worker,
    gauge,
)
from dshealthd.core.result import read_parsed
from dshealthd.core.text import printable
from dshealthd.maintenance.file import FILES, Maintenance, parse

ACTIVE = gauge("dshealthd_maintenance", "1 while the node is in maintenance, else 0.")
END = gauge(
    "dshealthd_maintenance_end_timestamp_seconds",
    "Unix time at which the maintenance expires; absent outside maintenance.",
)
BEGIN = gauge(
    "dshealthd_maintenance_begin_timestamp_seconds",
    "Unix time at which the maintenance began; absent outside maintenance.",
)
INFO = gauge(
    "dshealthd_maintenance_info",
    "1 for each source of the maintenance: operator or slurm. reason is the source's own text, at "
    "most 80 characters.",
    *("source", "reason"),
)


class MaintenanceCollector(Collector):
    """Reads the files of all sources; in a worker, as their disk can hang."""

    worker = Worker.STORAGE

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield whether the node is in maintenance; unknown if only a damaged file would say."""
        directory = self.context.state
        if directory is None:
            raise NotAvailable("a single collection reads no state")
        if (fault := self.context.entering(str(directory))) is not None:
            yield fault
            return
        now = self.context.wall()
        active: dict[str, Maintenance] = {}
        problem: SourceError | OSError | None = None
        for source, name in FILES.items():
            try:
                found = read_parsed(str(directory / name), parse)
            except FileNotFoundError:
                continue
            except (OSError, SourceError) as error:
                problem = error
            else:
                if found.end > now:
                    active[source] = found
        if not active and problem is not None:
            raise problem
        yield ACTIVE(float(bool(active)))
        for source, found in active.items():
            yield INFO(1.0, source, printable(found.reason))
        if active:
            yield BEGIN(min(found.begin for found in active.values()))
            yield END(max(found.end for found in active.values()))
