"""Hung training jobs on this node, and the culprit rank.

A job is hung when its ranks are silent for longer than usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, Fault, Sample, gauge
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.states import RankState, position
from dshealthd.jobs.options import HangOptions
from dshealthd.jobs.service import Jobs
from dshealthd.jobs.shares import MAX_RANKS, share_places
from dshealthd.linux.activity import ThreadState
from dshealthd.training.message import Phase, StepStage

if TYPE_CHECKING:
    from dshealthd.jobs.hangs.judge import Standstill

_RANK = ("training_job", "rank")
HANG = gauge(
    "dshealthd_job_hang",
    "1 while this node considers the job hung, by cause: process, checkpoint, input, desync, or "
    "waiting (no cause on this node; 0 for the first 90 s). 0 while its ranks here are silent "
    "but not hung: working (GPUs, CPUs, NCCL, files or sockets are active), between_steps "
    "(activity unknown), idle (no rank works or is in a collective), collective (some ranks "
    "wait for others, none works), starting (in the first steps), suspended (all processes here "
    "are stopped), debugger. 0 with class none while the job makes progress or is in a marked "
    "pause.",
    *("training_job", "class"),
)
PATIENCE = gauge(
    "dshealthd_job_hang_patience_seconds",
    "Longest time that the ranks of a silent job may be overdue while their activity is "
    "unknown: until a minute before the job's own watchdog ends it, but at most ten minutes of "
    "silence.",
    "training_job",
)
CULPRIT = gauge(
    "dshealthd_job_hang_culprit_info",
    "1 for a rank on this node that the others wait for: stopped, traced (in a debugger), prompt "
    "(waits for input from a terminal), gone, "
    "blocked in the kernel or in a checkpoint. If all ranks of the job are on this node, also "
    "paused (unlike the other ranks), input (between steps), behind or ahead. At most 8 per job.",
    *_RANK,
    *("class", "reason"),
)
OVERDUE = gauge(
    "dshealthd_job_overdue_seconds",
    "Time by which a rank's silence exceeds dshealthd_job_step_bound_seconds, else 0. Counts "
    "only while the agent runs.",
    *_RANK,
)
BOUND = gauge(
    "dshealthd_job_step_bound_seconds",
    "Longest usual silence in the rank's current phase: twice the longest of the last hours, at "
    "least 30 s; 100 s in the first steps. In a marked pause: half an hour the first time, "
    "later four times the longest, at least 5 min; less while no rank works, or if the rank is "
    "in a collective that times out sooner.",
    *_RANK,
)
POSITION = gauge(
    "dshealthd_job_position",
    "Progress of the rank in steps: completed steps, plus 1/3 in the next forward pass and 2/3 "
    "in its backward pass; less in the earlier passes of gradient accumulation. Absent if the "
    "stage is unknown.",
    *_RANK,
)
SILENT_POSITION = gauge(
    "dshealthd_job_silent_rank_position",
    "Progress of the rank in steps, like dshealthd_job_position, or its completed steps if "
    "stage is empty (unknown); only while the job is stalled on this node. Alert rules compare "
    "it between nodes.",
    *_RANK,
    "stage",
)
SILENT_OVERDUE = gauge(
    "dshealthd_job_silent_overdue_seconds",
    "Smallest dshealthd_job_overdue_seconds among the ranks on this node; only while the job is "
    "stalled here.",
    "training_job",
)
RUNNABLE = gauge(
    "dshealthd_job_runnable_ranks",
    "Ranks on this node whose process is not stopped by a signal.",
    "training_job",
)
STATE = gauge(
    "dshealthd_job_rank_state",
    "1 for the state of the main thread of the rank's process; blocked is an uninterruptible wait "
    "in the kernel, such as for storage.",
    *_RANK,
    "state",
)
PHASE_SECONDS = gauge(
    "dshealthd_job_phase_seconds",
    "Time for which a rank has been in its marked pause; absent while it trains.",
    *_RANK,
)
COLLECTIVE = gauge(
    "dshealthd_job_collective_seconds",
    "Time for which a silent rank has waited for others: between two steps, in a collective, or "
    "in a GPU kernel that moves no data. Absent while it does not wait, and if torch's waits "
    "are not visible.",
    *_RANK,
    "operation",
)
ENDED = gauge(
    "dshealthd_job_rank_ended_timestamp_seconds",
    "Unix time at which a rank that had made steps ended, and how: ended (exit status 0), "
    "failed (another status), terminated (a termination signal, or exit status 128 plus its "
    "number), killed (SIGKILL), crashed (another signal), unknown. Shown for ten minutes after "
    "the job's last rank here ended, longer while a rank here is silent, or until the job "
    "continues.",
    *_RANK,
    "how",
)


class JobHang(Collector):
    """Exports the state of the agent's hang detector."""

    Options = HangOptions

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the jobs that were hung at the last look, and the silence of their ranks."""
        detector = self.context.service(Jobs, "no heartbeats come in").hangs()
        for job, ranks in detector.jobs.items():
            if living := [rank for rank in ranks if rank.ended is None]:
                yield from hang_samples(job, detector.standstills.get(job))
                stopped = sum(rank.state is ThreadState.STOPPED for rank in living)
                yield RUNNABLE(len(living) - stopped, job)
        for job, rank in ranks_with_series(detector.jobs):
            yield from samples(job, rank)
            if job in detector.standstills and rank.ended is None:
                where = detector.standstills[job].waiting.get(rank.rank, "step")
                if where != "step":
                    seconds = rank.silence if where == "kernel" else rank.collective_for
                    yield COLLECTIVE(seconds, job, str(rank.rank), where)
                stage = "" if rank.stage is StepStage.UNKNOWN else rank.stage.name.lower()
                yield SILENT_POSITION(position(rank), job, str(rank.rank), stage)


def ranks_with_series(jobs: Mapping[str, Sequence[RankState]]) -> list[tuple[str, RankState]]:
    """Return the ranks of hung and running jobs that get series, each with its job.

    The rest are still watched and count. Ended ranks get only the places that running ones leave:
    if some ranks of a hung job had no series, the rest would be compared without them, and the
    wrong ranks would appear behind.
    """
    found: list[tuple[str, RankState]] = []
    for ended in (False, True):
        found += share_places(
            (
                (job, rank)
                for job, ranks in jobs.items()
                for rank in ranks
                if (rank.ended is not None) == ended
            ),
            MAX_RANKS - len(found),
            lambda entry: (entry[1].user, entry[0], entry[1].start),
        )
    return found


def hang_samples(job: str, found: Standstill | None) -> Iterator[Sample]:
    """Yield whether a job is hung, its class, and the culprit ranks."""
    if found is None:
        yield HANG(0, job, str(HangClass.NONE))
        return
    yield HANG(found.shown, job, str(found.reason))
    yield SILENT_OVERDUE(found.overdue, job)
    yield PATIENCE(found.patience, job)
    for rank, culprit in found.culprits:
        yield CULPRIT(1, job, str(rank), str(found.reason), str(culprit))


def samples(job: str, rank: RankState) -> Iterator[Sample]:
    """Yield the state and overdue silence of one rank; for an ended rank, only how it ended."""
    name = str(rank.rank)
    if rank.ended is not None and rank.ended_at is not None:
        if rank.settled:
            yield ENDED(rank.ended_at, job, name, str(rank.ended))
        return
    yield STATE(1, job, name, str(rank.state))
    yield BOUND(rank.bound, job, name)
    yield OVERDUE(max(0.0, rank.silence - rank.bound), job, name)
    if rank.phase is not Phase.TRAINING:
        yield PHASE_SECONDS(rank.phase_seconds, job, name)
    if rank.stage is not StepStage.UNKNOWN:
        yield POSITION(position(rank), job, name)
