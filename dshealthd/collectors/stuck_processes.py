"""Processes hung in the kernel, on a file system, a disk or a driver; from `/proc`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Reason,
    SourceError,
    Worker,
    every,
    gauge,
)
from dshealthd.linux.process import is_gpu_device, open_files, sleeping

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from dshealthd.core.collector import Context, Fault, Sample
    from dshealthd.linux.process import Sleep

STUCK = gauge(
    "dshealthd_processes_stuck",
    "Processes, excluding kernel threads, in uninterruptible sleep (state D) in two samples in a "
    "row, `interval` apart, without using CPU in between; SIGKILL does not end them.",
)
STUCK_ON_GPU = gauge(
    "dshealthd_gpu_processes_stuck",
    "Those of dshealthd_processes_stuck that have a GPU device open, so that their GPU stays in "
    "use; absent if their open files cannot all be read or exceed 32,768.",
)

_DESCRIPTORS = 32_768
"""Open descriptors looked at per sample: a fraction of a second. Users can have millions."""


class StuckProcesses(Collector):
    """Reads one file per process; in a worker, as a node may have thousands.

    Compares two samples, as a process that merely waits for its disk is in state D only for
    milliseconds.
    """

    worker = Worker.STORAGE

    Options = every("30s")

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._before: AbstractSet[Sleep] | None = None
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
            stuck = found.keys() & self._before
            yield STUCK(len(stuck))
            with_gpu = self._with_gpu(stuck)
            if with_gpu is not None:
                yield STUCK_ON_GPU(with_gpu)
        self._before = found.keys()

    def _with_gpu(self, stuck: AbstractSet[Sleep]) -> int | None:
        """Return the number of processes that have a GPU device open; None if it is unknown."""
        count, left = 0, _DESCRIPTORS
        for sleep in stuck:
            try:
                for file in open_files(self.host, sleep.pid):
                    if not left:
                        return None
                    left -= 1
                    if is_gpu_device(self.host, file):
                        count += 1
                        break
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except PermissionError:
                return None
        return count
