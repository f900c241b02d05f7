"""The ranks of a job on this node, and what their environment says, as far as it is allowed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dshealthd.collector import Context
from dshealthd.jobs.processes import ProcessTable
from dshealthd.jobs.ranks import Ranks

if TYPE_CHECKING:
    from dshealthd.evidence.step import Emit
    from dshealthd.host import Host


def find(_emit: Emit, host: Host, job: str) -> dict[str, Any]:
    """Return the ranks of a job here, of all jobs if it is empty, and how many processes could not be looked at by why."""
    context = Context(host=host, monotonic=time.monotonic, wall=time.time, sweep=1)
    table = ProcessTable(context)
    processes = table.refresh()
    found = [
        {"job": run.job, "rank": process.launch.rank, "pid": process.pid, "world": run.world_size, "environment": dict(process.environment)}
        for run in Ranks().runs(processes, table.machine)
        if not job or run.job == job
        for process in run.processes
    ]
    jobs = sorted({process.job for process in processes})
    return {"ranks": found, "jobs": jobs, "unseen": {str(reason): count for reason, count in table.unseen.items() if count}}
