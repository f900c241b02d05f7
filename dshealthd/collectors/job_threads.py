"""Threads of training jobs, and the limits of their cgroups.

Slurm, Kubernetes, Docker and systemd set these limits; at the limit, `fork` and `pthread_create`
fail.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from dshealthd.core.collector import Collector, Fault, NotAvailable, Sample, Worker, every, gauge
from dshealthd.core.result import one_of_many
from dshealthd.jobs import shares
from dshealthd.jobs.processes import ProcessTable, TrainingProcess
from dshealthd.linux.pids_cgroup import OutsideNamespace, Tasks, tasks_and_limit

THREADS = gauge(
    "dshealthd_job_threads",
    "Threads in the cgroup closest to its limit, among the cgroups of the job's processes and "
    "their parents; may include other processes. pids.current.",
    "training_job",
)
LIMIT = gauge(
    "dshealthd_job_threads_limit",
    "Thread limit of this cgroup; +Inf if unlimited. pids.max.",
    "training_job",
)


class JobThreads(Collector):
    """Reads `/proc` for the processes of jobs, in the worker that holds the process table."""

    worker = Worker.STORAGE

    Options = every("15s")

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield each job's threads and limits; a cgroup that cannot be read is a fault, never 0."""
        jobs = shares.jobs_with_places(self.context.shared(ProcessTable).refresh())
        for job, members in jobs.items():
            yield from one_of_many(f"job {job}", functools.partial(self._job, job, members))

    def _job(self, job: str, members: Iterable[TrainingProcess]) -> Iterator[Sample]:
        try:
            found = self._nearest(members)
        except OutsideNamespace as error:
            raise NotAvailable(
                f"the agent is in a cgroup namespace of its own: job {job} is in {error}; "
                "start its container with the host's (docker run --cgroupns=host)"
            ) from error
        if found is not None:
            yield THREADS(found.current, job)
            yield LIMIT(found.limit, job)

    def _nearest(self, members: Iterable[TrainingProcess]) -> Tasks | None:
        found: list[Tasks] = []
        for process in members:
            try:
                counted = tasks_and_limit(self.host, process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if counted is not None:
                found.append(counted)
        return max(found, key=lambda one: (one.share, one.current), default=None)
