"""The ranks of a job on this node to collect evidence from, with their environments."""

from __future__ import annotations

import operator
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.core.collector import Context
from dshealthd.evidence.findings import NodeMembers, RankEvidence
from dshealthd.evidence.flight_recorder import DUMPS, PIPE
from dshealthd.jobs.ownership import claimed_name
from dshealthd.jobs.processes import ProcessTable, Unseen
from dshealthd.jobs.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Collection

    from dshealthd.core.host import Host
    from dshealthd.linux.forked import Emit

MAX_RANKS = 128
"""Ranks returned; users take turns.

The variables needed of each rank are 20 KiB at most, and an answer is limited to 4 MiB.
"""
DEADLINE = 8.0
"""Seconds for what only reads `/proc`, as `find` does: a generous time of a slow machine."""
MAX_SWEEPS = 16
"""Sweeps of the process table, each of which reads 32 MiB of environments."""
_NEEDED = frozenset((PIPE, *DUMPS, "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"))
"""Variables that the steps of a collection use."""
MEMBERS = schema.of(NodeMembers)


def find(_emit: Emit, host: Host, job: str, pids: Collection[int] = ()) -> dict[str, Any]:
    """Return the ranks of `job` on this node, or of all jobs if it is empty, as the JSON of
    `NodeMembers`. `pids` are known
    ranks of the job: if any of them exist, only processes of their users count as its ranks.
    """
    context = Context(host=host, monotonic=time.monotonic, wall=time.time, sweep=1)
    table = ProcessTable(context)
    processes = table.refresh()
    while table.unseen[Unseen.DEFERRED] and context.sweep < MAX_SWEEPS:
        context.sweep += 1  # environments can be long, and no event loop waits for this process
        processes = table.refresh()
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
    return dict(MEMBERS.write(NodeMembers(fair[:MAX_RANKS], jobs, unseen)))
