"""What NCCL tells of the jobs on this node by its RAS: ranks that are missing, operations launched, errors; asked of one node per job.

That node is the one with rank 0, by the environment of its processes, and it stays the one for as long as the job has processes there.
Where rank 0 cannot be seen (another user's, without privileges; gone before the agent started) nobody asks, and every node says so by
the state `elsewhere`. A job in a network namespace of its own cannot be asked from outside. Not run against a real NCCL yet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.collector import Collector, CollectorOptions, Fault, Reason, Sample, gauge
from dshealthd.jobs.processes import ProcessTable
from dshealthd.jobs.ras import client as ras_client
from dshealthd.jobs.ras.address import enabled, endpoints
from dshealthd.jobs.ras.client import Query
from dshealthd.jobs.ras.from_json import parse_json
from dshealthd.jobs.ras.from_text import parse_text
from dshealthd.jobs.ras.peer import holder
from dshealthd.jobs.ras.progress import Progress
from dshealthd.jobs.ras.protocol import Answer, NoListener, Stranger, Unanswered
from dshealthd.jobs.ras.status import MalformedAnswer
from dshealthd.jobs.ras.summary import classes, lags, troubles
from dshealthd.kernel.netlink import Interrupted, MalformedReply
from dshealthd.options import Duration, option

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from dshealthd.collector import Context
    from dshealthd.host import Host
    from dshealthd.jobs.processes import TrainingProcess
    from dshealthd.jobs.ras.status import Status

STATE = gauge(
    "dshealthd_job_nccl_ras_state",
    "1 for what became of the last query of NCCL's RAS: answered; failed; no_listener (no NCCL, not yet, or before 2.24); stranger "
    "(a process of another job has the address); disabled (NCCL_RAS_ENABLE); namespace (the job's network is not the agent's); elsewhere "
    "(this node is not the one that asks: it shows no rank 0).",
    "job",
    "state",
)
INFO = gauge("dshealthd_job_nccl_info", "1 with the version of NCCL that answers for the job.", "job", "version")
ANSWERED = gauge("dshealthd_job_nccl_answer_timestamp_seconds", "Unix time of the last answer of the job's RAS.", "job")
TIMEOUTS = gauge("dshealthd_job_nccl_ras_timeouts", "Links of RAS's own network that timed out while it collected the last answer.", "job")
COMMUNICATORS = gauge("dshealthd_job_nccl_communicators", "Communicators of the job, by how many ranks they are made of.", "job", "size")
COMPARED = gauge(
    "dshealthd_job_nccl_communicators_compared",
    "Communicators whose counts can be compared with those of the answer before. Of NCCL before 2.28.7 those alone whose ranks differ.",
    "job",
    "size",
)
MOVING = gauge(
    "dshealthd_job_nccl_communicators_moving", "Of those compared, the ones in which a rank has launched more since.", "job", "size"
)
RANKS = gauge(
    "dshealthd_job_nccl_ranks",
    "Ranks of these communicators by state: init, running, finalize, abort, not_member (its process knows nothing of the communicator: "
    "not yet or no longer), unresponsive, dead (given up after a minute). A process counts once for each communicator. Absent is none.",
    "job",
    "size",
    "state",
)
PROCESSES = gauge("dshealthd_job_nccl_processes_missing", "Processes of the job that are unresponsive or dead to RAS.", "job", "state")
LAUNCHED = gauge(
    "dshealthd_job_nccl_operations_launched",
    "Operations launched, not completed, by the rank with the least and the one with the most, in the communicator of this size where they "
    "are furthest apart; which one that is may change. Before NCCL 2.28.7 known where ranks differ, alone.",
    "job",
    "size",
    "operation",
    "bound",
)
ERRORS = gauge(
    "dshealthd_job_nccl_ranks_failed",
    "Ranks with an error in init or, asynchronously, later. Absent is none.",
    "job",
    "size",
    "kind",
    "error",
)
PROGRESS = gauge(
    "dshealthd_job_nccl_progress_timestamp_seconds",
    "Unix time of the last answer in which any rank had launched operations since the one before; absent until that is seen.",
    "job",
)
IDLE = gauge(
    "dshealthd_job_nccl_answers_without_progress",
    "Answers in a row in which no rank had launched anything since the one before; absent where answers cannot be compared. An operation "
    "that hangs on the GPU is launched, and so are those queued behind it: this alone does not prove a hang, nor 0 that there is none.",
    "job",
)
LAG = gauge(
    "dshealthd_job_nccl_rank_operations_behind",
    "By how many operations a rank is behind, in a communicator that stands still; at most 8 ranks a job. Rank is the number among all "
    "ranks where a communicator of WORLD_SIZE tells it; host is an address on NCCL's bootstrap network, gpu NVML's index there.",
    "job",
    "rank",
    "host",
    "gpu",
    "operation",
)
TROUBLE = gauge(
    "dshealthd_job_nccl_rank_trouble_info",
    "1 for a rank that is dead, unresponsive or has an error; at most 8 a job, the dead first. Labels as for a rank that is behind.",
    "job",
    "rank",
    "host",
    "gpu",
    "trouble",
)
LEFT_OUT = gauge("dshealthd_job_nccl_jobs_left_out", "Training jobs on this node that are not asked, as there are more than max_jobs.")

SPARE = 2.0
"""Seconds that a collection needs beside the queries."""


@dataclass(frozen=True, kw_only=True)
class NcclRasOptions(CollectorOptions):
    """Options of this collector."""

    interval: Duration = option("15s", "Time from one query to the next. Each goes through all processes of a job.", minimum="1s")
    deadline: Duration = option("20s", "How long all queries, or reading one answer, may take until the worker is given up.", minimum="1s")
    timeout: Duration = option("12s", "How long a job may take to answer; NCCL needs up to 10 s where processes are stopped.", minimum="1s")
    max_jobs: int = option(8, "Training jobs that are asked, the oldest first.", minimum=1, maximum=100)
    max_bytes: int = option(
        16 << 20, "Length of an answer beyond which it is refused. A rank takes some 600 bytes for each communicator.", minimum=1 << 16
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong although its type is right."""
        if self.deadline < self.timeout + SPARE:
            yield "deadline", f"must be at least {SPARE:g} s more than timeout ({self.timeout})"


@dataclass(slots=True)
class _Job:
    """What is remembered of a job that this node asks."""

    progress: Progress = field(default_factory=Progress)
    responder: int | None = None
    """Pid of the process that answered last."""
    query: Query | None = None
    """The one of this collection."""


class NcclRas(Collector):
    """Asks all jobs side by side, so that one that hangs costs the others nothing; in a worker of its own, which may wait."""

    worker = "jobs"
    Options = NcclRasOptions

    def __init__(self, options: NcclRasOptions, context: Context) -> None:
        """Ask nobody yet."""
        super().__init__(options, context)
        self._jobs: dict[str, _Job] = {}

    @classmethod
    def absent(cls, options: NcclRasOptions, host: Host) -> str | None:  # noqa: ARG003 - as every collector
        """Say that there is no driver that NCCL could use."""
        places = (host.device("nvidiactl"), host.device("dxg"), host.sys("module/nvidia"))
        return None if any(map(os.path.exists, places)) else "no NVIDIA driver, and so no NCCL"

    def collect(self) -> Iterator[Sample | Fault]:
        """Ask each job of which this node has rank 0. A job that does not answer is a fault, and its numbers are absent."""
        jobs: dict[str, list[TrainingProcess]] = {}
        for process in self.context.shared(ProcessTable).refresh():
            jobs.setdefault(process.job, []).append(process)
        yield LEFT_OUT(max(0, len(jobs) - self.options.max_jobs))
        jobs = dict(list(jobs.items())[: self.options.max_jobs])
        self._jobs = {job: known for job, known in self._jobs.items() if job in jobs}
        asked: dict[str, Query] = {}
        for job, members in jobs.items():
            prepared = self._prepare(job, members)
            if isinstance(prepared, Query):
                asked[job] = prepared
            else:
                state, fault = prepared
                yield STATE(1, job, state)
                if fault is not None:
                    yield fault
        if (fault := self.context.approach("queries")) is not None:
            yield fault
            return
        ras_client.ask(asked.values(), self.options.timeout, self.context.monotonic)
        for job, query in asked.items():
            yield from self._report(job, query.outcome, next((p.launch.world_size for p in jobs[job]), None))

    def _prepare(self, job: str, members: list[TrainingProcess]) -> Query | tuple[str, Fault | None]:
        """Return the query of a job, or why there is none."""
        first = next((process for process in members if process.launch.rank == 0), None)
        if first is None and job not in self._jobs:
            return "elsewhere", None
        known = self._jobs.setdefault(job, _Job())
        process = first or members[0]
        if not enabled(process.environment):
            return "disabled", None
        if self._foreign_network(process.pid):
            return "namespace", None
        if (fault := self.context.approach(f"job {job}")) is not None:
            return "failed", fault
        try:
            addresses = endpoints(process.environment)
        except ValueError as error:
            return "failed", Fault(f"job {job}", Reason.NOT_FOUND, str(error))
        pids = [process.pid for process in members]

        def vouch(connection: socket.socket) -> bool:
            pids.sort(key=lambda pid: pid != known.responder)
            try:
                known.responder = holder(connection, pids, self.host, self.context.monotonic)
            except (Interrupted, MalformedReply) as error:
                raise Unanswered(Reason.IO_ERROR, f"who answers is not known: {error}") from error
            return known.responder is not None

        return Query(addresses, vouch, self.options.max_bytes)

    def _foreign_network(self, pid: int) -> bool:
        """Tell whether a process is known to be in another network namespace than the agent."""
        try:
            theirs, ours = os.stat(self.host.proc(f"{pid}/ns/net")), os.stat("/proc/self/ns/net")
        except OSError:
            return False  # who answers is checked in any case
        return (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)

    def _report(self, job: str, outcome: object, world_size: int | None) -> Iterator[Sample | Fault]:
        """Yield what came of a query; what is known from before goes on being true, by its time."""
        progress = self._jobs[job].progress
        if isinstance(outcome, NoListener | Stranger):
            yield STATE(1, job, "no_listener" if isinstance(outcome, NoListener) else "stranger")
        elif isinstance(outcome, Unanswered):
            yield STATE(1, job, "failed")
            yield Fault(f"job {job}", outcome.reason, outcome.detail)
        elif isinstance(outcome, Answer):
            self.context.approach(f"job {job}")  # to read it may take long, or more memory than there is
            try:
                status = parse_json(outcome.data) if outcome.json else parse_text(outcome.data)
            except MalformedAnswer as error:
                yield STATE(1, job, "failed")
                yield Fault(f"job {job}", Reason.MALFORMED, str(error))
            else:
                progress.update(status, self.context.wall())
                yield STATE(1, job, "answered")
                yield from _samples(job, status, progress, world_size)
        if progress.answered is not None:
            yield ANSWERED(progress.answered, job)
        if progress.last is not None:
            yield PROGRESS(progress.last, job)
        if progress.idle is not None:
            yield IDLE(progress.idle, job)


def _samples(job: str, status: Status, progress: Progress, world_size: int | None) -> Iterator[Sample]:
    """Yield the numbers of one answer."""
    if status.version:
        yield INFO(1, job, status.version)
    if status.timeouts is not None:
        yield TIMEOUTS(status.timeouts, job)
    for state, count in status.processes.items():
        yield PROCESSES(count, job, state)
    for size, group in classes(status, progress.moving).items():
        yield COMMUNICATORS(group.communicators, job, size)
        yield COMPARED(group.compared, job, size)
        yield MOVING(group.moving, job, size)
        for state, ranks in group.states.items():
            yield RANKS(ranks, job, size, state)
        for (kind, error), ranks in group.errors.items():
            yield ERRORS(ranks, job, size, kind, error)
        for operation, spread in group.operations.items():
            yield LAUNCHED(spread.least, job, size, operation, "minimum")
            yield LAUNCHED(spread.most, job, size, operation, "maximum")
    for (rank, operation), behind in lags(status, progress, world_size).items():
        yield LAG(behind, job, *rank, operation)
    for rank, what in troubles(status, world_size):
        yield TROUBLE(1, job, *rank, what)
