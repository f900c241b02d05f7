"""Processes that hang in the kernel: for a file system, a disk or a driver. From `/proc`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Reason,
    SourceError,
    Worker,
    gauge,
)
from dshealthd.core.options import Duration, option
from dshealthd.linux.uninterruptible import sleeping

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from dshealthd.core.collector import Context, Fault, Sample
    from dshealthd.linux.uninterruptible import Sleep

STUCK = gauge(
    "dshealthd_processes_stuck",
    "Processes, kernel threads aside, that were in uninterruptible sleep (state D) at two "
    "looks, `interval` apart, and used no CPU in between: SIGKILL does not end them.",
)


@dataclass(frozen=True, kw_only=True)
class StuckProcessesOptions(CollectorOptions):
    """How far apart two looks are."""

    interval: Duration = option("30s", "Time from one sample to the next.", minimum="100ms")


class StuckProcesses(Collector):
    """Reads a file of each process; in a worker, as a node may have thousands.

    Two looks, since a process that only waits for its disk is in state D for milliseconds.
    """

    worker = Worker.STORAGE

    Options = StuckProcessesOptions

    def __init__(self, options: StuckProcessesOptions, context: Context) -> None:
        """Look at nothing yet."""
        super().__init__(options, context)
        self._before: AbstractSet[Sleep] | None = None

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield how many processes are stuck in the kernel; the first look tells none."""
        try:
            found = sleeping(self.host)
        except ValueError as error:
            raise SourceError(Reason.MALFORMED, str(error)) from error
        if found is None:
            raise SourceError(
                Reason.PERMISSION_DENIED, "hidepid: /proc does not show the processes of others"
            )
        if self._before is not None:
            yield STUCK(len(found.keys() & self._before))
        self._before = found.keys()
