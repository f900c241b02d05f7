"""Jobs that do nothing: for how long, and from when on that is a hang where no heartbeats show one.

A rank does nothing if its main thread takes no CPU time, and all its threads little, of which none
waits for a CPU, or only to spin for a GPU that waits in a kernel, and no GPU of it computes; a job,
if none of its ranks here does anything, no child process of theirs computes, and no bytes move
through files or connections. What is not known is work.

That is a hang only of a job that was at work before, of several ranks, of which none waits for
somebody outside: those whose ranks serve clients, sit at a prompt or are held by a debugger may
rest for hours. Ranks elsewhere may be at work, so a node judges a job alone only if it has all its
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from dshealthd.core import schema
from dshealthd.core.collector import gauge
from dshealthd.core.text import several
from dshealthd.findings import launches
from dshealthd.findings.finding import Sign
from dshealthd.findings.series import Series, by
from dshealthd.findings.stalls import judged_by_heartbeats, of_processes, waiting_gpus
from dshealthd.findings.work import work
from dshealthd.jobs.hangs.judge import NOTICE, UNEXPLAINED
from dshealthd.jobs.hangs.silence import FLOOR, MARGIN
from dshealthd.linux.activity import BUSY, IDLE_BYTES, IDLE_SHARE

IDLE = gauge(
    "dshealthd_job_idle_seconds",
    "Time for which the job has been idle on this node: no rank's main thread used 1 % of a "
    "core, no rank used or waited for half a core (except to spin while its GPU waits in a "
    "kernel), no GPU computed, child processes used less than half a core, and the job moved at "
    "most 10 kB/s. Absent while unknown.",
    "training_job",
)
RANKS = gauge(
    "dshealthd_job_idle_ranks",
    "Ranks on this node of a job without heartbeats that has been idle for too long: 90 s, or "
    "twice its longest pause so far, but at most until a minute before its own watchdog ends "
    "it. Absent for other jobs, and while a rank waits for something outside the job or serves "
    "clients.",
    "training_job",
)
EXPORTED = (IDLE, RANKS)
WORKED = 30.0
"""Seconds for which all ranks must have been at work at the same time before their rest is a hang:
to import torch takes each of them ten and more, and what only holds an allocation (`sleep`, `ray
start`, a shell) a few.
"""
_Seconds = Annotated[float, schema.Number(0, 1e9)]


@dataclass(slots=True)
class Rest:
    """What is remembered of a job."""

    began: float | None = schema.transient(default=None)
    """Monotonic time since which it has been idle; None while it is not known to be."""
    longest: _Seconds = 0.0
    """The longest rest that has ended, seconds."""
    worked: _Seconds = 0.0
    """Seconds for which all its ranks here have been at work, at the same time."""

    def limit(self, watchdog: float) -> float:
        """Return the seconds of rest from which it is a hang, if its watchdog ends it after so
        many.
        """
        if self.longest >= watchdog:  # which would have ended it then: it was in no collective
            return math.inf
        return max(FLOOR, min(max(UNEXPLAINED, MARGIN * self.longest), watchdog - NOTICE))


@dataclass(slots=True)
class Idleness:
    """Remembers the rests of this node's jobs."""

    jobs: dict[str, Rest] = field(default_factory=dict)
    """Not since when they are idle, once another agent has looked."""
    at: float = schema.transient(default=math.nan)
    """Monotonic time of the last look."""

    def settle(self, series: Series, now: float) -> None:
        """Add to `series` for how long each job has been idle, at monotonic time `now`."""
        elapsed = now - self.at if now > self.at else 0.0  # not before the first look
        self.at = now
        jobs = by(series("job_watchdog_seconds"), "training_job", min)
        here = by(series("job_ranks"), "training_job")
        self.jobs = {job: self.jobs.get(job) or Rest() for job in jobs}
        for job, rest in self.jobs.items():
            works = at_work(series, job, int(here.get(job, 0.0)))
            idle = works is not None and not any(works.values())
            if idle:
                rest.began = now if rest.began is None else rest.began
            elif rest.began is not None:
                lasted, rest.began = now - rest.began, None
                if works is not None and lasted >= FLOOR:
                    rest.longest = max(rest.longest, lasted)
            if works and all(works.values()):
                rest.worked += elapsed
            seconds = 0.0 if rest.began is None else now - rest.began
            if works is not None:
                series.add([IDLE(seconds, job)])
            if (
                idle
                and seconds >= rest.limit(jobs[job])
                and rest.worked >= WORKED
                and not occupied(series, job)
                and not judged_by_heartbeats(series, job)
            ):
                series.add([RANKS(here[job], job)])


def at_work(series: Series, job: str, ranks: int) -> dict[str, bool] | None:
    """Return for each rank of a job here whether it is at work; None if one's is not known."""
    shares = by(series("job_rank_cpu_cores", training_job=job, threads="main"), "rank", max)
    cores_of = by(series("job_rank_cpu_cores", training_job=job, threads="all"), "rank", max)
    seen, cores = work(series, job), series.value("job_children_cpu_cores", training_job=job)
    located: dict[str, list[tuple[str, str]]] = {}
    for labels, _ in series("job_gpu_info", training_job=job):
        located.setdefault(labels["rank"], []).append((labels["gpu"], labels["uuid"]))
    if cores is None or not 0 < ranks <= len(shares):
        return None
    moved = [
        series.value(name, training_job=job)
        for name in ("job_file_bytes_per_second", "job_socket_bytes_per_second")
    ]
    if (
        launches.launches_lately(series, job)
        or seen.says
        or cores >= BUSY
        or sum(filter(None, moved)) > IDLE_BYTES
    ):
        return dict.fromkeys(shares, True)
    waiting = waiting_gpus(series)
    found = {}
    for rank, share in shares.items():
        gpus = located.get(rank, ())
        if gpus and int(rank) not in seen.still:
            return None  # what its GPU does is not known
        spins = bool(gpus) and waiting.issuperset(gpus)
        found[rank] = (share >= IDLE_SHARE or cores_of[rank] >= BUSY) and not spins
    return None if None in moved and not any(found.values()) else found


def occupied(series: Series, job: str) -> bool:
    """Return whether a rank of a job here waits for somebody outside it, or serves clients."""
    return any(
        series.has(name, training_job=job)
        for name in ("job_rank_awaits_info", "job_rank_serves_info")
    )


def idle(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose ranks are all here, and have been idle for too long."""
    for labels, ranks in series("job_idle_ranks"):
        job = labels["training_job"]
        world = max((size for _, size in series("job_world_size", training_job=job)), default=1.0)
        if 1 < world <= ranks:
            named = several(of_processes(series).get(job, {}).values())
            hint = _odd(series, job) + launches.ranks_behind(series, job)
            yield Sign(
                "DshealthdJobStalled",
                named or f"no rank has used CPU or GPU, nor moved data{hint}",
                job=job,
                value=series.value("job_idle_seconds", training_job=job),
                source="job_idle_seconds",
                hold=0.0,
            )


def _odd(series: Series, job: str) -> str:
    """Return which rank's GPU alone runs no kernel while those of all others wait in one; otherwise
    nothing: it is where to begin, and no proof.
    """
    seen = work(series, job)
    if len(apart := seen.still - seen.waits) != 1 or len(seen.waits) <= 1:
        return ""
    (rank,) = apart
    return f"; the GPU of rank {rank} runs no kernel, those of the others wait in one"


RULES = (idle,)
