"""The ranks of a job on this node to collect evidence from, with their environments."""

from __future__ import annotations

import functools
import operator
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.core.collector import Context, Fault, Reason
from dshealthd.core.text import plural
from dshealthd.evidence.findings import NodeMembers, RankEvidence
from dshealthd.evidence.flight_recorder import DUMPS, PIPE
from dshealthd.jobs.ownership import claimed_name
from dshealthd.jobs.processes import ProcessTable, Unseen
from dshealthd.jobs.ranks import Ranks
from dshealthd.linux.forked import Emit, Ended, Pool, computes

if TYPE_CHECKING:
    from dshealthd.core.host import Host

MAX_RANKS = 64
"""Ranks that are inspected; users take turns."""
DEADLINE = 8.0
"""Seconds for what only reads `/proc`, as `find` does: a generous time of a slow machine."""
STALL = 1.0
"""Seconds at one process, of which most take less than a millisecond: a rank may wait in a driver
with the lock of its memory, which a reader of its environment then waits for. One that waits for a
CPU, as where the training's threads have them all, is at any process by chance.
"""
_MAX_ENTERED = 1 << 28
"""Bytes of the names of processes that `find` enters: those of four million, the most pids."""
MAX_SWEEPS = 16
"""Sweeps of the process table, each of which reads 32 MiB of environments."""
_NEEDED = frozenset((PIPE, *DUMPS, "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"))
"""Variables that the steps of a collection use."""
MEMBERS = schema.of(NodeMembers)


class _Stalled(Exception):
    """A search takes too long at one process."""


class _Progress:
    """Where a search is: at which process, and since when."""

    def __init__(self, pool: Pool) -> None:
        self.part = ""
        self._since = 0.0
        self._suspected = 0.0
        """Since when it was at the process at which it seemed to stall."""
        self._pool = pool

    def enter(self, _name: str, part: bytes) -> None:
        self.part, self._since = part.decode(), time.monotonic()

    def check(self) -> None:
        is_late = self.part and time.monotonic() - self._since > STALL
        if is_late and not any(map(computes, self._pool.pids)):
            # At a second look: it may have gone on since its output was read.
            if self._suspected == self._since:
                raise _Stalled
            self._suspected = self._since


def search(host: Host, job: str, pids: Collection[int] = ()) -> Ended:
    """Return how `find` has ended in a process of its own. OSError if none can be started.

    A process at which it stalls is left out of another attempt: it must not hide the others.
    """
    left_out: set[str] = set()
    end = time.monotonic() + DEADLINE
    while True:
        function = functools.partial(
            find, host=host, job=job, pids=pids, left_out=frozenset(left_out)
        )
        pool = Pool()
        progress = _Progress(pool)
        try:
            pool.start("ranks", function, DEADLINE, _MAX_ENTERED, progress.enter)
            return next(pool.ended(progress.check))
        except _Stalled:
            left_out.add(progress.part)
        finally:
            pool.close()
        if time.monotonic() > end:
            problem = f"hangs at {plural(len(left_out), 'process', 'processes')}"
            return Ended("ranks", DEADLINE, problem=problem, hung=True)


def find(
    emit: Emit,
    host: Host,
    job: str,
    pids: Collection[int] = (),
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    """Return the ranks of `job` on this node, or of all jobs if it is empty, as the JSON of
    `NodeMembers`. `pids` are known ranks of the job: if any of them exist, only processes of their
    users count as its ranks. Emits each process that it enters, but for those `left_out`.
    """

    def entering(part: str) -> Fault | None:
        if part in left_out:
            return Fault(part, Reason.STUCK, "its environment cannot be read")
        emit("entered", part.encode())
        return None

    context = Context(
        host=host, monotonic=time.monotonic, wall=time.time, entering=entering, sweep=1
    )
    table = ProcessTable(context)
    processes = table.refresh()
    while table.unseen[Unseen.DEFERRED] and context.sweep < MAX_SWEEPS:
        context.sweep += 1  # environments can be long, and no event loop waits for this process
        processes = table.refresh()
    emit("entered", b"")
    users = {process.user for process in processes if process.pid in pids}
    if job and users:
        processes = [
            replace(process, job=job)
            for process in processes
            if process.user in users and process.claimed == claimed_name(job)
        ]
    turns = Counter[int | None]()
    found = []
    for run in Ranks().runs(processes, table.machine):
        for process in run.processes if not job or run.job == job else ():
            needed = {
                name: process.environment[name] for name in _NEEDED & process.environment.keys()
            }
            place = process.launch.rank, process.pid, process.start, process.parent
            rank = RankEvidence(run.job, *place, run.world_size, needed)
            found.append((turns[process.user], rank))
            turns[process.user] += 1
    fair = [rank for _, rank in sorted(found, key=operator.itemgetter(0))]
    unseen = {str(reason): count for reason, count in table.unseen.items() if count}
    jobs = sorted({process.job for process in processes})
    more = max(0, len(fair) - MAX_RANKS)
    return dict(MEMBERS.write(NodeMembers(fair[:MAX_RANKS], more, jobs, unseen)))
