"""A node on which one job of genuine NCCL runs, and the collector of RAS that looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dshealthd.collectors.nccl_ras import NcclRas
from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionResult, attempt
from dshealthd.jobs.ras.options import NcclRasOptions
from dshealthd.jobs.ras.status import Status
from tests.nccl.job import Job


def show(root: Path, *jobs: Job) -> Path:
    """Return a `/proc` that shows the processes of jobs alone, and what is no process."""
    proc = root / "proc"
    proc.mkdir(parents=True)
    for name in os.listdir("/proc"):
        if not name.isdecimal() and name not in {"self", "thread-self"}:
            (proc / name).symlink_to(f"/proc/{name}")
    add(proc, *jobs)
    return proc


def add(proc: Path, *jobs: Job) -> None:
    """Have a `/proc` that was made by `show` show the processes of more jobs."""
    for rank in (rank for job in jobs for rank in job.ranks):
        (proc / str(rank.pid)).symlink_to(f"/proc/{rank.pid}")


def evidence(name: str, state: Path, *flags: str) -> str:
    """Take evidence of a job by hand, and return its summary."""
    command = [sys.executable, "-m", "dshealthd", "evidence", "--job", name]
    command += ["--path.state", str(state), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class Node:
    """Asks the job as the agent does, as often as the test wants."""

    def __init__(self, job: Job, root: Path) -> None:
        self.job = job
        self.context = Context(host=Host(procfs=show(root, job), sysfs=root, dev=root))
        # Patience for a machine that has other work, and no rest between queries.
        options = NcclRasOptions(
            timeout=Duration(25), deadline=Duration(40), healthy_interval=Duration(0)
        )
        self.collector = NcclRas(options, self.context)

    def sweep(self) -> CollectionResult:
        """Look at the job once."""
        self.context.sweep += 1
        return attempt(self.collector, self.context.monotonic)

    def status(self) -> Status:
        """Return what RAS answers, once; AssertionError if it does not."""
        result = self.sweep()
        state = self.state(result)
        assert state == "answered", (state, [fault.detail for fault in result.faults])
        status = self.collector._jobs[self.job.name].status
        assert status is not None
        return status

    def state(self, result: CollectionResult) -> str:
        """Return what became of a query."""
        (state,) = (
            str(sample.labels[1])
            for sample in result.samples
            if sample.metric.name == "dshealthd_job_nccl_ras_state"
        )
        return state

    def samples(self, result: CollectionResult, name: str) -> dict[tuple[str, ...], float]:
        """Return a metric of the job, without prefix, by its labels but the job."""
        return {
            tuple(map(str, sample.labels[1:])): sample.value
            for sample in result.samples
            if sample.metric.name == f"dshealthd_job_nccl_{name}"
        }
