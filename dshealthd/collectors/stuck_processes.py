"""Processes hung in the kernel, on a file system, a disk or a driver; from `/proc`."""

from __future__ import annotations

from collections.abc import Iterator

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Reason,
    Sample,
    SourceError,
    Worker,
    every,
    gauge,
)
from dshealthd.linux.process import Sleep, sleeping

STUCK = gauge(
    "dshealthd_processes_stuck",
    "User processes in uninterruptible sleep (state D) in two consecutive samples without using "
    "CPU in between; SIGKILL does not end them.",
)


class StuckProcesses(Collector):
    """Reads one file per process; in a worker, as a node may have thousands.

    Compares two samples, as a process that merely waits for its disk is in state D only for
    milliseconds.
    """

    worker = Worker.STORAGE

    Options = every("30s")

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._before: set[Sleep] | None = None
        self._kernel_threads: set[str] = set()

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the number of processes stuck in the kernel; nothing in the first sample."""
        try:
            found = sleeping(self.host, self._kernel_threads)
        except (ValueError, ArithmeticError) as error:
            raise SourceError(Reason.MALFORMED, str(error)) from error
        if found is None:
            raise SourceError(
                Reason.PERMISSION_DENIED, "hidepid: /proc does not show other users' processes"
            )
        if self._before is not None:
            yield STUCK(len(found & self._before))
        self._before = found
