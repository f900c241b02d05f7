"""Answers of NCCL's RAS for the jobs whose rank 0 is on this node.

Missing and lagging ranks, and errors; queried from one node per job.

That node is the one with rank 0, according to the environment of its processes, for as long as the
job has processes there. If rank 0 cannot be seen (another user's, without privileges; gone before
the agent started), no node queries the job, and every node reports the state `elsewhere`. A job in
its own network namespace cannot be queried from outside.

A query can crash training with some NCCL releases, so a job is queried only if every NCCL that its
processes have mapped is known to be safe (`dshealthd.jobs.ras.policy`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, Context, Fault, News, Reason, Sample, Worker, gauge
from dshealthd.core.result import one_of_many
from dshealthd.jobs import shares
from dshealthd.jobs.nccl.release import MappedReleases
from dshealthd.jobs.processes import ProcessTable, TrainingProcess
from dshealthd.jobs.ras import client as ras_client
from dshealthd.jobs.ras import evaluation, question
from dshealthd.jobs.ras.address import ras_enabled
from dshealthd.jobs.ras.evaluation import JobProgress, by_size, lags, troubles
from dshealthd.jobs.ras.from_json import parse_json
from dshealthd.jobs.ras.options import NcclRasOptions
from dshealthd.jobs.ras.protocol import NoListener, Stranger, Unanswered
from dshealthd.jobs.ras.question import JobProcess
from dshealthd.jobs.ras.status import ImpossibleAnswer, MalformedAnswer, Status
from dshealthd.jobs.ras.watched import WatchedJob, own_pid
from dshealthd.linux.pci import driver_absent

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.jobs.ras.client import Query

STATE = gauge(
    "dshealthd_job_nccl_ras_state",
    "1 for the outcome of the last query of NCCL's RAS: answered; split (its parts consider "
    "each other dead, as after a stop of more than a minute; the job may be healthy, and its "
    "answers are ignored until it restarts); failed; no_listener (no RAS yet); stranger "
    "(another job's process has the address); disabled (NCCL_RAS_ENABLE); namespace (the job "
    "has its own network namespace); elsewhere (rank 0 is on another node, which queries). Not "
    "queried: not_loaded (no process of the job has mapped NCCL yet); release_without_ras "
    "(before 2.24); release_without_json (2.24, 2.25); unsafe_release (2.26 to 2.28.6: "
    "answering can crash the job); unsafe_on_ipv6 (2.28.7 to 2.28.9 with an IPv6 bootstrap "
    "network); unknown_release (see ask_unknown_releases); implausible (an answer was "
    "inconsistent; until the job restarts).",
    *("training_job", "state"),
)
COMMUNICATORS = gauge(
    "dshealthd_job_nccl_communicators",
    "Communicators of the job, by number of ranks.",
    *("training_job", "size"),
)
RANKS = gauge(
    "dshealthd_job_nccl_ranks",
    "Ranks of these communicators by state: init, running, finalize, abort, not_member (its "
    "process does not know the communicator yet, or has left it), unresponsive, dead (after a "
    "minute without response). A process counts once per communicator. Absent means none.",
    *("training_job", "size", "state"),
)
IDLE = gauge(
    "dshealthd_job_nccl_answers_without_progress",
    "Consecutive answers in which no rank had launched anything since the previous answer; absent "
    "if answers cannot be compared. An operation hung on the GPU counts as launched, as do those "
    "queued behind it: a high value alone does not prove a hang, nor does 0 rule one out.",
    "training_job",
)
LAG = gauge(
    "dshealthd_job_nccl_rank_operations_behind",
    "Number of operations by which a rank is behind in a communicator without progress; at most "
    "8 ranks per job. rank is the global rank, if known; host is an address on NCCL's bootstrap "
    "network; gpu is the NVML index on that host.",
    *("training_job", "rank", "host", "gpu", "operation"),
)
TROUBLE = gauge(
    "dshealthd_job_nccl_rank_trouble_info",
    "1 for a rank that is dead, unresponsive or has an error; at most 8 per job, dead ones "
    "first. remote_error marks a rank that lost its connection to another rank: check the other "
    "rank. Labels as for dshealthd_job_nccl_rank_operations_behind.",
    *("training_job", "rank", "host", "gpu", "trouble"),
)


class NcclRas(Collector):
    """Queries all jobs concurrently, so that a hung one does not delay the others.

    Runs in a worker of its own, which may wait.
    """

    worker = Worker.JOBS
    wakes_on = frozenset({News.HANG_SUSPECTED, News.GPU_ERROR, News.GPU_MEMORY, News.NVLINK})
    Options = NcclRasOptions

    def __init__(self, options: NcclRasOptions, context: Context) -> None:
        super().__init__(options, context)
        self._jobs: dict[str, WatchedJob] = {}
        self._releases = MappedReleases()

    @classmethod
    # as every collector
    def absent(cls, options: NcclRasOptions, host: Host) -> str | None:  # noqa: ARG003
        """Return why the collector is absent if there is no driver that NCCL could use."""
        return driver_absent(host)

    def collect(self) -> Iterator[Sample | Fault]:
        """Query the RAS of each job whose rank 0 is on this node.

        A job that does not answer is a fault, and its numbers are absent.
        """
        jobs = shares.jobs_with_places(self.context.shared(ProcessTable).refresh())
        self._jobs = {job: known for job, known in self._jobs.items() if job in jobs}
        asked: dict[str, Query] = {}
        for job, members in jobs.items():
            yield from one_of_many(
                f"job {job}", functools.partial(self._add_query, job, members, asked)
            )
        if (fault := self.context.entering("queries")) is not None:
            yield fault
            return
        ras_client.send_queries(asked.values(), self.options.timeout, self.context.monotonic)
        for job, query in asked.items():
            report = functools.partial(self._report, job, query, _world_size(jobs[job]))
            found = list(one_of_many(f"job {job}", report))
            self._jobs[job].samples = [item for item in found if isinstance(item, Sample)]
            yield from found

    def _add_query(
        self, job: str, members: list[TrainingProcess], asked: dict[str, Query]
    ) -> Iterator[Sample | Fault]:
        """Add the job's query to `asked`, or yield why there is none, or what is still known."""
        first = next((process for process in members if process.launch.rank == 0), None)
        if first is None and job not in self._jobs:
            yield STATE(1, job, "elsewhere")
            return
        known = self._jobs.setdefault(job, WatchedJob())
        process = first or members[0]
        if not ras_enabled(process.environment):
            yield STATE(1, job, "disabled")
        elif process.network:  # where unknown, the process that answers is checked in any case
            yield STATE(1, job, "namespace")
        elif (fault := self.context.entering(f"job {job}")) is not None:
            yield STATE(1, job, "failed")
            yield fault
        elif self._due(job, known):
            yield from self._question(job, members, process, asked)
        else:
            yield from known.samples

    def _due(self, job: str, known: WatchedJob) -> bool:
        """Return whether to query a job's RAS now.

        News brings forward only the queries of the jobs it concerns: all jobs of the node for a
        hardware error.
        """
        heard, now = {about for _, about in self.context.heard}, self.context.monotonic()
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
        members: list[TrainingProcess],
        process: TrainingProcess,
        asked: dict[str, Query],
    ) -> Iterator[Sample | Fault]:
        """Add the RAS query of a job that is due to `asked`, or yield why it may not be queried."""
        known = self._jobs[job]
        loaded = question.loaded_by(self.host, map(_member, members), self._releases)
        pids = frozenset(loaded.pids)
        starts = frozenset(found.key for found in members if found.pid in pids)
        known.record_loaded(loaded, starts, self.context.monotonic())
        decision = question.decide(
            self.host, loaded, permit_unknown=self.options.ask_unknown_releases
        )
        if not loaded.versions:
            yield STATE(1, job, "not_loaded")
        elif known.ended:
            known.refused()
            yield STATE(1, job, "implausible")
            yield Fault(f"job {job}", Reason.MALFORMED, known.ended)
        elif not decision.is_asked:
            known.refused()
            known.samples = [STATE(1, job, decision.reason)]
            yield from known.samples
        else:
            try:
                asked[job] = question.prepare(
                    process.environment, loaded, self.host, known.responder
                )
            except (ValueError, ArithmeticError) as error:
                yield STATE(1, job, "failed")
                yield Fault(f"job {job}", Reason.NOT_FOUND, str(error))

    def _report(self, job: str, query: Query, world_size: int | None) -> Iterator[Sample | Fault]:
        """Yield the outcome of a RAS query, and what is still known from earlier answers."""
        known, outcome = self._jobs[job], query.outcome
        known.responder = query.responder
        if isinstance(outcome, NoListener | Stranger):
            yield STATE(1, job, "no_listener" if isinstance(outcome, NoListener) else "stranger")
        elif isinstance(outcome, Unanswered):
            yield STATE(1, job, "failed")
            yield Fault(f"job {job}", outcome.reason, outcome.detail)
        elif isinstance(outcome, bytes):
            # Parsing it may take long, or exhaust the memory.
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
                known.answered(status, answerer, self.options.interval)
                yield STATE(1, job, "split" if known.split else "answered")
                if not known.split:
                    yield from _samples(job, status, known.progress, world_size)
        if known.progress.idle is not None:
            yield IDLE(known.progress.idle, job)

    def _believed(self, known: WatchedJob, answer: bytes, world_size: int | None) -> Status:
        """Return the parsed RAS answer if plausible. Raises MalformedAnswer, ImpossibleAnswer."""
        status = parse_json(answer)
        versions = known.loaded.versions if known.loaded is not None else frozenset()
        evaluation.check(status, versions, world_size)
        if known.status is not None:
            evaluation.check_change(known.status, status, world_size)
        return status


def _member(process: TrainingProcess) -> JobProcess:
    return JobProcess(process.pid, process.start, process.parent, process.launch.rank)


def _world_size(members: list[TrainingProcess]) -> int | None:
    return max((size for found in members if (size := found.launch.world_size)), default=None)


def _samples(
    job: str, status: Status, progress: JobProgress, world_size: int | None
) -> Iterator[Sample]:
    communicators, ranks = by_size(status)
    for size, count in communicators.items():
        yield COMMUNICATORS(count, job, size)
    for (size, state), count in ranks.items():
        yield RANKS(count, job, size, state)
    for (rank, operation), behind in lags(status, progress, world_size).items():
        yield LAG(behind, job, *rank, operation)
    for rank, what in troubles(status, world_size):
        yield TROUBLE(1, job, *rank, what)
