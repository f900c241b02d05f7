"""What NCCL's RAS answers for the jobs of which this node has rank 0.

Ranks that are missing, operations launched, errors; asked of one node per job.

That node is the one with rank 0, by the environment of its processes, and it stays the one for as
long as the job has processes there. Where rank 0 cannot be seen (another user's, without
privileges; gone before the agent started) nobody asks, and every node says so by the state
`elsewhere`. A job in a network namespace of its own cannot be asked from outside.

A query can crash the training with some releases of NCCL, so that a job is asked only where all
that its processes have mapped is known to be safe (`dshealthd.jobs.ras.policy`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dshealthd.core.collector import (
    Collector,
    Fault,
    News,
    Reason,
    Sample,
    Worker,
    counter,
    gauge,
)
from dshealthd.jobs import shares
from dshealthd.jobs.nccl.release import MappedReleases
from dshealthd.jobs.processes import ProcessTable
from dshealthd.jobs.ras import client as ras_client
from dshealthd.jobs.ras import plausibility, policy, question
from dshealthd.jobs.ras.address import enabled
from dshealthd.jobs.ras.client import Query
from dshealthd.jobs.ras.options import NcclRasOptions
from dshealthd.jobs.ras.protocol import NoListener, RasAnswer, Stranger, Unanswered
from dshealthd.jobs.ras.question import JobProcess
from dshealthd.jobs.ras.split import own_pid
from dshealthd.jobs.ras.status import ImpossibleAnswer, MalformedAnswer
from dshealthd.jobs.ras.summary import classes, lags, troubles
from dshealthd.jobs.ras.watched import WatchedJob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Context
    from dshealthd.core.host import Host
    from dshealthd.jobs.processes import TrainingProcess
    from dshealthd.jobs.ras.progress import JobProgress
    from dshealthd.jobs.ras.status import Status

STATE = gauge(
    "dshealthd_job_nccl_ras_state",
    "1 for what became of the last query of NCCL's RAS: answered; split (its parts take each other "
    "for dead, as after a stop of more than a minute; the job may be well, and nothing that "
    "they say "
    "is shown until it restarts); failed; no_listener (no RAS yet); "
    "stranger (a process of another job has the address); disabled (NCCL_RAS_ENABLE); namespace "
    "(the job's network is not the agent's); elsewhere (this node is not the one that asks: it "
    "shows no rank 0). Not asked: not_loaded (no process of the job has mapped NCCL, so far); "
    "release_without_ras (before 2.24); unsafe_release (2.26 to 2.28.6, whose answer can crash the "
    "job); unsafe_on_ipv6 (2.28.7 to 2.28.9 with an IPv6 bootstrap network); unknown_release (see "
    "ask_unknown_releases); implausible (an answer could not be true; until the job restarts).",
    "job",
    "state",
)
IMPLAUSIBLE = counter(
    "dshealthd_job_nccl_ras_implausible_answers_total",
    "Answers of the job's RAS that cannot be true, such as a communicator of size 0 or with more "
    "ranks than the job. The first one ends the queries of the job, until it restarts.",
    "job",
)
INFO = gauge(
    "dshealthd_job_nccl_info",
    "1 with the version of NCCL that answers for the job.",
    "job",
    "version",
)
ANSWERED = gauge(
    "dshealthd_job_nccl_answer_timestamp_seconds",
    "Unix time of the last answer of the job's RAS.",
    "job",
)
TIMEOUTS = gauge(
    "dshealthd_job_nccl_ras_timeouts",
    "Links of RAS's own network that timed out while it collected the last answer.",
    "job",
)
COMMUNICATORS = gauge(
    "dshealthd_job_nccl_communicators",
    "Communicators of the job, by how many ranks they are made of.",
    "job",
    "size",
)
COMPARED = gauge(
    "dshealthd_job_nccl_communicators_compared",
    "Communicators whose counts can be compared with those of the answer before. Of NCCL "
    "before 2.28.7 those alone whose ranks differ.",
    "job",
    "size",
)
MOVING = gauge(
    "dshealthd_job_nccl_communicators_moving",
    "Of those compared, the ones in which a rank has launched more since.",
    "job",
    "size",
)
RANKS = gauge(
    "dshealthd_job_nccl_ranks",
    "Ranks of these communicators by state: init, running, finalize, abort, not_member (its "
    "process knows nothing of the communicator: "
    "not yet or no longer), unresponsive, dead (given up after a minute). A process counts "
    "once for each communicator. Absent is none.",
    "job",
    "size",
    "state",
)
PROCESSES = gauge(
    "dshealthd_job_nccl_processes_missing",
    "Processes of the job that are unresponsive or dead to RAS.",
    "job",
    "state",
)
LAUNCHED = gauge(
    "dshealthd_job_nccl_operations_launched",
    "Operations launched, not completed, by the rank with the least and the one with the "
    "most, in the communicator of this size where they "
    "are furthest apart; which one that is may change. Before NCCL 2.28.7 known where ranks "
    "differ, alone.",
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
    "Unix time of the last answer in which any rank had launched operations since the "
    "previous one; absent until that is seen.",
    "job",
)
IDLE = gauge(
    "dshealthd_job_nccl_answers_without_progress",
    "Answers in a row in which no rank had launched anything since the previous one; absent "
    "where answers cannot be compared. An operation "
    "that hangs on the GPU is launched, and so are those queued behind it: this alone does "
    "not prove a hang, nor 0 that there is none.",
    "job",
)
LAG = gauge(
    "dshealthd_job_nccl_rank_operations_behind",
    "By how many operations a rank is behind, in a communicator without progress; at most 8 ranks "
    "a job. Rank is the number among all ranks where a communicator of WORLD_SIZE tells it, and "
    "unclear where NCCL (2.24, 2.25) does not name who is; host is an address on NCCL's bootstrap "
    "network, gpu NVML's index there.",
    "job",
    "rank",
    "host",
    "gpu",
    "operation",
)
TROUBLE = gauge(
    "dshealthd_job_nccl_rank_trouble_info",
    "1 for a rank that is dead, unresponsive or has an error; at most 8 a job, the dead "
    "first. remote_error is a rank that lost its connection to another, which is the one to look "
    "at. Labels as for a rank that is behind.",
    "job",
    "rank",
    "host",
    "gpu",
    "trouble",
)
LEFT_OUT = gauge(
    "dshealthd_job_nccl_jobs_left_out",
    "Training jobs on this node that are not asked, as there are more than max_jobs.",
)


class NcclRas(Collector):
    """Asks all jobs side by side, so that one that hangs costs the others nothing.

    In a worker of its own, which may wait.
    """

    worker = Worker.JOBS
    wakes_on = frozenset({News.HANG_SUSPECTED, News.GPU_ERROR, News.GPU_MEMORY, News.NVLINK})
    Options = NcclRasOptions

    def __init__(self, options: NcclRasOptions, context: Context) -> None:
        """Ask nobody yet."""
        super().__init__(options, context)
        self._jobs: dict[str, WatchedJob] = {}
        self._releases = MappedReleases()

    @classmethod
    def absent(cls, options: NcclRasOptions, host: Host) -> str | None:  # noqa: ARG003 - as every collector
        """Say that there is no driver that NCCL, and so its RAS, could use."""
        places = (host.device("nvidiactl"), host.device("dxg"), host.sys("module/nvidia"))
        return None if any(map(os.path.exists, places)) else "no NVIDIA driver, and so no NCCL"

    def collect(self) -> Iterator[Sample | Fault]:
        """Ask the RAS of each job of which this node has rank 0.

        A job that does not answer is a fault, and its numbers are absent.
        """
        jobs, left_out = shares.jobs(
            self.context.shared(ProcessTable).refresh(), self.options.max_jobs
        )
        yield LEFT_OUT(left_out)
        self._jobs = {job: known for job, known in self._jobs.items() if job in jobs}
        asked: dict[str, Query] = {}
        for job, members in jobs.items():
            prepared = self._prepare(job, members)
            if isinstance(prepared, Query):
                asked[job] = prepared
            elif prepared is None:
                yield from self._jobs[job].samples
            else:
                state, fault = prepared
                yield STATE(1, job, state)
                if job in self._jobs:
                    yield IMPLAUSIBLE(self._jobs[job].implausible, job)
                if fault is not None:
                    yield fault
        if (fault := self.context.entering("queries")) is not None:
            yield fault
            return
        ras_client.ask(asked.values(), self.options.timeout, self.context.monotonic)
        for job, query in asked.items():
            found = list(self._report(job, query, _world_size(jobs[job])))
            self._jobs[job].samples = [item for item in found if isinstance(item, Sample)]
            yield from found

    def _prepare(
        self, job: str, members: list[TrainingProcess]
    ) -> Query | tuple[str, Fault | None] | None:
        """Return the RAS query of a job, or why there is none; None where it is not due yet."""
        first = next((process for process in members if process.launch.rank == 0), None)
        if first is None and job not in self._jobs:
            return "elsewhere", None
        known = self._jobs.setdefault(job, WatchedJob())
        process = first or members[0]
        if not enabled(process.environment):
            return "disabled", None
        if self._foreign_network(process.pid):
            return "namespace", None
        if (fault := self.context.entering(f"job {job}")) is not None:
            return "failed", fault
        now = self.context.monotonic()
        if not self._due(job, known, now):
            return None
        return self._question(job, known, members, process, now)

    def _due(self, job: str, known: WatchedJob, now: float) -> bool:
        """Tell whether to ask a job's RAS now. News brings forward the queries of those alone that
        it concerns: all jobs of the node, where its hardware had an error.
        """
        heard = {about for _, about in self.context.heard}
        if "" in heard:
            known.watch_closely()
        if job in heard and known.hurry(now):
            return True
        if heard and not known.rested(now, self.options.interval):
            return False
        return known.due(self.host, now, self.options.healthy_interval)

    def _question(
        self,
        job: str,
        known: WatchedJob,
        members: list[TrainingProcess],
        process: TrainingProcess,
        now: float,
    ) -> Query | tuple[str, Fault | None]:
        """Return the RAS query of a job that is due, or why it may not be asked."""
        loaded = question.look(self.host, map(_member, members), self._releases)
        pids = frozenset(loaded.pids)
        starts = frozenset((found.pid, found.start) for found in members if found.pid in pids)
        known.looked(loaded, starts, now)
        if not loaded.versions:
            return "not_loaded", None
        if known.ended:
            known.refused()
            return "implausible", Fault(f"job {job}", Reason.MALFORMED, known.ended)
        decision = question.decide(
            self.host, loaded, permit_unknown=self.options.ask_unknown_releases
        )
        if decision.form is None:
            known.refused()
            known.samples = [
                STATE(1, job, decision.reason),
                IMPLAUSIBLE(known.implausible, job),
            ]
            return decision.reason, None
        try:
            return question.prepare(
                process.environment,
                loaded,
                decision.form,
                self.host,
                self.context.monotonic,
                self.options.max_bytes,
                known.responder,
            )
        except ValueError as error:
            return "failed", Fault(f"job {job}", Reason.NOT_FOUND, str(error))

    def _foreign_network(self, pid: int) -> bool:
        """Tell whether a process's RAS is known to be in another network namespace."""
        try:
            theirs, ours = os.stat(self.host.proc(f"{pid}/ns/net")), os.stat("/proc/self/ns/net")
        except OSError:
            return False  # who answers is checked in any case
        return (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)

    def _report(self, job: str, query: Query, world_size: int | None) -> Iterator[Sample | Fault]:
        """Yield what came of a RAS query; what was known before stays true, by its time."""
        known, outcome = self._jobs[job], query.outcome
        known.responder = query.responder
        if isinstance(outcome, NoListener | Stranger):
            yield STATE(1, job, "no_listener" if isinstance(outcome, NoListener) else "stranger")
        elif isinstance(outcome, Unanswered):
            yield STATE(1, job, "failed")
            yield Fault(f"job {job}", outcome.reason, outcome.detail)
        elif isinstance(outcome, RasAnswer):
            # To read it may take long, or more memory than there is.
            self.context.entering(f"job {job}")
            try:
                status = self._believed(known, outcome, world_size)
            except MalformedAnswer as error:
                implausible = isinstance(error, ImpossibleAnswer)
                if implausible:
                    known.disbelieve(str(error))
                yield STATE(1, job, "implausible" if implausible else "failed")
                yield Fault(f"job {job}", Reason.MALFORMED, str(error))
            else:
                answerer = query.responder and own_pid(self.host, query.responder)
                known.answered(status, self.context.wall(), answerer, self.options.interval)
                yield STATE(1, job, "split" if known.split else "answered")
                if not known.split:
                    yield from _samples(job, status, known.progress, world_size)
        yield IMPLAUSIBLE(known.implausible, job)
        progress = known.progress
        if progress.answered is not None:
            yield ANSWERED(progress.answered, job)
        if progress.last is not None:
            yield PROGRESS(progress.last, job)
        if progress.idle is not None:
            yield IDLE(progress.idle, job)

    def _believed(self, known: WatchedJob, answer: RasAnswer, world_size: int | None) -> Status:
        """Return what a RAS answer says. Raises MalformedAnswer, ImpossibleAnswer."""
        status = question.read(answer)
        form = policy.Form.JSON if answer.json else policy.Form.TEXT
        versions = known.loaded.versions if known.loaded is not None else frozenset()
        plausibility.check(status, form, versions, world_size)
        if known.status is not None:
            plausibility.check_change(known.status, status, world_size)
        return status


def _member(process: TrainingProcess) -> JobProcess:
    return JobProcess(process.pid, process.start, process.parent, process.launch.rank)


def _world_size(members: list[TrainingProcess]) -> int | None:
    """Return the largest world size that a process of the job says."""
    return max((size for found in members if (size := found.launch.world_size)), default=None)


def _samples(
    job: str, status: Status, progress: JobProgress, world_size: int | None
) -> Iterator[Sample]:
    """Yield the numbers of one RAS answer."""
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
