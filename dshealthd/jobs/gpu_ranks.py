"""Which ranks of training jobs have a process on a GPU: NVML's pids looked up in `/proc`, each once in the life of its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dshealthd.host import read_bytes
from dshealthd.jobs.environment import job, launch, parse_environ
from dshealthd.jobs.processes import ENVIRON_LIMIT, ProcessTable, parse_stat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.collector import Context

_UNINTERRUPTIBLE = "D"


class Rank(NamedTuple):
    """A rank of a job."""

    job: str
    number: int


class GpuRanks:
    """Remembers whose process each pid is. A process that waits in the kernel is looked at when it does so no more."""

    def __init__(self, context: Context) -> None:
        """Look at nothing yet."""
        self._context = context
        self._known: dict[tuple[int, int], Rank | None] = {}

    def of(self, pids: Iterable[int]) -> tuple[dict[int, Rank], int]:
        """Return the ranks among these processes, and of how many it is not known whether they are some."""
        found: dict[int, Rank] = {}
        known: dict[tuple[int, int], Rank | None] = {}
        unknown = 0
        for pid in sorted(set(pids)):
            try:
                stat = parse_stat(read_bytes(self._context.host.proc(f"{pid}/stat"), 4096))
                key = pid, stat.start
                if key not in self._known and (stat.state == _UNINTERRUPTIBLE or self._context.approach(f"process {pid}") is not None):
                    unknown += 1  # to read its environment may hang
                    continue
                rank = known[key] = self._known[key] if key in self._known else self._look(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except (OSError, ValueError):
                unknown += 1
                continue
            if rank is not None:
                found[pid] = rank
        self._known = known
        return found, unknown

    def _look(self, pid: int) -> Rank | None:
        environment = parse_environ(read_bytes(self._context.host.proc(f"{pid}/environ"), ENVIRON_LIMIT))
        place = launch(environment)
        return None if place is None else Rank(job(environment, self._context.shared(ProcessTable).machine), place.rank)
