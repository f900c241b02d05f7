"""Which ranks of training jobs have a process on a GPU.

NVML's pids are looked up in `/proc`, each once in the life of its process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dshealthd.jobs.processes import (
    UNINTERRUPTIBLE,
    ProcessTable,
    TrainingProcess,
    part_of,
    read_process,
    read_stat,
    with_owners,
)

if TYPE_CHECKING:
    from dshealthd.core.collector import Context


class GpuRanks:
    """A cache of the ranks behind pids.

    A process in uninterruptible sleep is looked up after it wakes.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[tuple[int, int], TrainingProcess | None] = {}

    def ranks_of(self, pids: Iterable[int]) -> tuple[dict[int, TrainingProcess], int]:
        """Return those of these processes that are ranks' by pid, and the number of unidentified
        ones.
        """
        found: list[TrainingProcess] = []
        known: dict[tuple[int, int], TrainingProcess | None] = {}
        unknown, machine = 0, self._context.shared(ProcessTable).machine
        for pid in set(pids):
            try:
                stat = read_stat(self._context.host, pid)
                key = pid, stat.start
                if key not in self._known and (
                    stat.state == UNINTERRUPTIBLE
                    or self._context.entering(part_of(self._context.host, pid)) is not None
                ):
                    unknown += 1  # reading its environment may hang
                    continue
                process = known[key] = (
                    self._known[key]
                    if key in self._known
                    else read_process(self._context.host, pid, stat, machine)
                )
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except (OSError, ValueError, ArithmeticError):
                unknown += 1
                continue
            if process is not None:
                found.append(process)
        self._known = known
        return {process.pid: process for process in with_owners(found)}, unknown
