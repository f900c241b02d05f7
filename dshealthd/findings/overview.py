"""The overview of this node's training jobs: ranks, progress, hangs, failures and culprits."""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.core.documents import LeftOut
from dshealthd.core.text import several
from dshealthd.findings.jobs import explanation
from dshealthd.findings.slowness import of_job
from dshealthd.findings.stalls import IDLE_SECONDS
from dshealthd.findings.work import awaited
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.silence import MARGIN
from dshealthd.jobs.own_work import SCALES

if TYPE_CHECKING:
    from dshealthd.findings.series import Series
    from dshealthd.jobs.hangs.judge import Standstill

MAX_ROLES = 8
"""Most roles of a job told: a node of 8 GPUs has no more."""
MAX_RANKS = 64
"""Most ranks listed of a job; no node has more GPUs."""
PAUSE = 5.0
"""Seconds from which a marked pause is shown: checkpoints of a moment would make a page flicker."""
SILENT = 30.0
"""Seconds without a heartbeat from which that is said of a job that trains."""
STATES = ("no heartbeats", "training", "silent", "paused", "suspended", "stalled", "failed", "hung")
"""States of a job on a node, from best to worst."""
_FIGURES = {
    "step_seconds": "job_step_seconds",
    "work_seconds": "job_step_work_seconds",
    "wait_seconds": "job_step_wait_seconds",
    "overdue_seconds": "job_overdue_seconds",
    "bound_seconds": "job_step_bound_seconds",
    "heartbeat": "job_heartbeat_timestamp_seconds",
}
"""What is told of a rank, by the metric that has it."""
_LABELS = {
    "wait_source": ("job_step_work_seconds", "source"),
    "phase": ("job_phase", "phase"),
    "stage": ("job_stage", "stage"),
    "process": ("job_rank_state", "state"),
    "gpu": ("job_gpu_info", "gpu"),
}
"""The same of those that have it as a label of the series that is not 0."""
_NOT_AT_WORK = {HangClass.IDLE, HangClass.COLLECTIVE}
_BETWEEN_STEPS = {("stalled", cause) for cause in (HangClass.BETWEEN_STEPS, *_NOT_AT_WORK)}


class JobPart(NamedTuple):
    """What one node shows of a job, or all of its nodes together; None is unknown."""

    state: str
    cause: str = ""
    """The class of its standstill; empty if there is none."""
    ranks: int = 0
    world_size: int | None = None
    step: int | None = None
    """The lowest of its ranks; None without heartbeats."""
    step_highest: int | None = None
    steps_per_minute: float | None = None
    loss: str = "unknown"
    attempts: int | None = None
    """Of its run, with this one."""


def merge_job(parts: Sequence[JobPart]) -> JobPart:
    """Return a job as all its nodes show it together; without a pace unless it trains."""
    state = _state_of_all(parts)
    paces = [part.steps_per_minute for part in parts if part.steps_per_minute is not None]
    losses = {part.loss for part in parts}
    return JobPart(
        state,
        ranks=sum(part.ranks for part in parts),
        world_size=next((part.world_size for part in parts if part.world_size), None),
        step=min((part.step for part in parts if part.step is not None), default=None),
        step_highest=max(
            (part.step_highest for part in parts if part.step_highest is not None), default=None
        ),
        steps_per_minute=min(paces, default=None) if state == "training" else None,
        loss=next((one for one in ("not finite", "finite") if one in losses), "unknown"),
        attempts=max((part.attempts for part in parts if part.attempts), default=None),
    )


def _state_of_all(parts: Sequence[JobPart]) -> str:
    """Return the state of a job from what all its nodes show of it: the worst, unless the nodes
    together know better.

    Ranks that wait for one on another node look hung on theirs; ranks that are stopped on one node
    alone hold up those on the others; and only all nodes see that no rank is left for which those
    wait that pause between two steps.
    """
    known = {(part.state, part.cause) for part in parts}
    states = {state for state, _ in known}
    worst = max(states, key=lambda state: STATES.index(state) if state in STATES else 1)
    if worst in {"hung", "stalled"} and "suspended" in states:
        return "hung"
    if len(parts) > 1 and known <= _BETWEEN_STEPS and _none_at_work(parts):
        return "hung"
    if known == {("stalled", HangClass.IDLE), ("no heartbeats", "")}:
        return "no heartbeats"  # ranks of other nodes are at work
    if worst == "silent" and "training" in states:
        return "training"  # some were just heard
    if worst == "hung" and ("hung", HangClass.PROCESS) not in known:
        if "paused" in states:
            return "paused"
        at_work = {HangClass.WORKING, HangClass.DEBUGGER} & {cause for _, cause in known}
        if not states.isdisjoint({"training", "silent"}) or at_work:
            return "stalled"
    return worst


def _none_at_work(parts: Sequence[JobPart]) -> bool:
    """Return whether the ranks of a job that pause between two steps do not do so together, or some
    wait in collectives and none is at work, as `dshealthd:job:hang` has it.

    Not of several runs within one allocation, which do not wait for each other.
    """
    ranks = sum(part.ranks for part in parts)
    world = max((part.world_size for part in parts if part.world_size), default=None)
    if world is not None and ranks > world:
        return False
    steps = {part.step for part in parts} | {part.step_highest for part in parts}
    apart = len(steps - {None}) > 1
    causes = {part.cause for part in parts}
    return apart or (ranks == world and HangClass.COLLECTIVE in causes <= _NOT_AT_WORK)


def overview(
    series: Series, bundles: str, left_out: LeftOut | None = None, wall: float = 0.0
) -> list[dict[str, Any]]:
    """Return each job of this node, hung and failed ones first; one that has stopped to make steps
    is `silent`, then `stalled` or `suspended`, if it is not hung; one in a marked pause is
    `paused`.

    `bundles` is the directory of the evidence; `left_out` learns which jobs and ranks were left
    out; `wall` is the Unix time in seconds.
    """
    left_out = left_out or LeftOut()
    names = {
        point.labels["training_job"]
        for metric in ("job_step", "job_ranks", "job_failure_info")
        for point in series(metric)
    } | series.standstills.keys()
    jobs = left_out.each(
        "job", sorted(names), str, lambda name: _job(series, name, bundles, left_out, wall)
    )
    return sorted(jobs, key=lambda job: job["hang"] is None and not job["failures"])


def _job(series: Series, job: str, bundles: str, left_out: LeftOut, wall: float) -> dict[str, Any]:
    ranks = list(_ranks(series, job, left_out))
    steps = [rank["step"] for rank in ranks if rank["step"] is not None]
    baseline = [rank["step_seconds"] for rank in ranks if rank["step_seconds"]]
    losses = {point.value for point in series("job_loss_finite", training_job=job)}
    info = series.first("job_info", training_job=job)
    world = info.get("world_size") or series.value("job_world_size", training_job=job)
    evidence = sorted(
        point.labels["bundle"] for point in series("evidence_bundle_info", training_job=job)
    )
    seen = [int(point.value) for point in series("job_ranks", training_job=job)]
    found = series.standstills.get(job)
    if found and found.reason in _NOT_AT_WORK and sum(seen) > len(ranks):
        # What the ranks without heartbeats do is not known.
        found = dataclasses.replace(found, reason=HangClass.BETWEEN_STEPS)
    hang = _hang(found, explanation(series, job, found)) if found and found.shown else None
    stall = _stall(found) if found and not hang else None
    stall = stall or (None if found else _paused(series, job) or _idle(series, job))
    silent_now = _is_silent(ranks, wall)
    failures = _failures(series, job)
    process = series.first("job_process_info", training_job=job)
    if hang or failures:
        state = "hung" if hang else "failed"
    elif found:
        state = "suspended" if found.reason is HangClass.SUSPENDED else "stalled"
    elif not steps:
        state = "stalled" if stall else "no heartbeats"
    elif stall:
        state = "paused"
    else:
        state = "silent" if silent_now else "training"
    attempts = series.value("job_attempts", training_job=job)
    return {
        "job": job,
        "script": process.get("script"),
        "user": process.get("user"),
        "pid": int(process["pid"]) if process else None,
        "launcher": info.get("launcher", ""),
        "world_size": None if world is None else int(world),
        "ranks_here": max(len(ranks), sum(seen)),
        "followed": {
            point.labels["by"]: int(point.value)
            for point in series("job_followed_ranks", training_job=job)
        },
        "step": min(steps, default=None),
        "step_highest": max(steps, default=None),
        "steps_per_minute": round(60 / statistics.median(baseline), 2)
        if baseline and not (found or stall or silent_now)
        else None,
        "loss": "unknown" if not losses else "finite" if losses == {1.0} else "not finite",
        "state": state,
        "attempts": None if attempts is None else int(attempts),
        "hang": hang,
        "stall": stall,
        "failures": failures,
        "own_work": [
            {
                "over": part.over,
                "role": part.role,
                "ranks": part.ranks,
                "step_seconds": part.step,
                **part.figures._asdict(),
            }
            for part in list(of_job(series, job))[: len(SCALES) * MAX_ROLES]
        ],
        "evidence": f"{bundles}/{evidence[-1]}" if evidence and bundles else None,
        "ranks": ranks[:MAX_RANKS],
    }


def _is_silent(ranks: Sequence[Mapping[str, Any]], wall: float) -> bool:
    """Return whether no rank here was heard for longer than in the last hours: half of its
    bound.
    """
    heard = [rank["heartbeat"] for rank in ranks if rank["heartbeat"] is not None]
    bound = max((rank["bound_seconds"] or 0.0 for rank in ranks), default=0.0)
    return bool(heard) and wall - max(heard) > max(SILENT, bound / MARGIN)


def _ranks(series: Series, job: str, left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """Yield this node's ranks that send heartbeats, in order of rank."""
    found = sorted({int(point.labels["rank"]) for point in series("job_step", training_job=job)})
    ratios = {
        rank: round(value / usual(work.values()), 3)
        for work in _work(series, job).values()
        if len(work) > 1
        for rank, value in work.items()
    }

    def rank(number: int) -> dict[str, Any]:
        id = {"training_job": job, "rank": str(number)}
        return {
            "rank": number,
            "step": None if (step := series.value("job_step", **id)) is None else int(step),
            "work_ratio": ratios.get(str(number)),
            "loss_finite": None
            if (finite := series.value("job_loss_finite", **id)) is None
            else finite == 1,
            **{field: series.value(metric, **id) for field, metric in _FIGURES.items()},
            **{
                field: next((p.labels[label] for p in series(metric, **id) if p.value > 0), None)
                for field, (metric, label) in _LABELS.items()
            },
        }

    yield from left_out.each(f"job {job}, rank", found, str, rank)


def _hang(found: Standstill, says: str) -> dict[str, Any]:
    """Return the hang of a job: cause, culprits, time without progress."""
    return {
        "cause": str(found.reason),
        "says": says,
        "overdue_seconds": found.overdue,
        "culprits": [
            {"rank": rank, "reason": str(culprit), "says": culprit.words}
            for rank, culprit in found.culprits
        ],
    }


def _stall(found: Standstill) -> dict[str, Any]:
    """Return a silence that is no hang: what it may be, for how long, and until when."""
    unseen = _awaiting(found.work.awaits) if found.reason is HangClass.BETWEEN_STEPS else ""
    return {
        "cause": str(found.reason),
        "says": found.explanation + unseen,
        "silent_seconds": found.silence,
        "hung_in_seconds": None if math.isinf(found.hold) else max(0.0, found.hold - found.overdue),
    }


def _awaiting(awaits: Mapping[int, str]) -> str:
    """Return which ranks wait for an answer from outside the job, and whose; empty if none does."""
    named = several([f"rank {rank} waits for {peer}" for rank, peer in awaits.items()])
    return f": {named}" if named else ""


def _paused(series: Series, job: str) -> dict[str, Any] | None:
    """Return the longest marked pause in which a rank of a job is; None if all train."""
    phases = {
        labels["rank"]: labels["phase"]
        for labels, value in series("job_phase", training_job=job)
        if value == 1
    }
    paused = series("job_phase_seconds", training_job=job)
    seconds, phase = max(
        ((point.value, phases.get(point.labels["rank"])) for point in paused),
        default=(0.0, None),
        key=operator.itemgetter(0),
    )
    if phase is None or seconds < PAUSE:
        return None
    return {"cause": phase, "says": phase, "silent_seconds": seconds, "hung_in_seconds": None}


def _idle(series: Series, job: str) -> dict[str, Any] | None:
    """Return for how long a job without heartbeats has been seen to do nothing here; None if it
    does, or if that is not known.
    """
    idle = series.value("job_idle_seconds", training_job=job) or 0.0
    if idle < IDLE_SECONDS or series.has("job_step", training_job=job):
        return None
    says = f"no rank here has used CPU or GPU{_awaiting(awaited(series, job))}"
    return {"cause": HangClass.IDLE, "says": says, "silent_seconds": idle, "hung_in_seconds": None}


def _failures(series: Series, job: str) -> list[dict[str, Any]]:
    """Return why the job failed according to its logs, one entry per culprit; a null rank is
    unknown.
    """
    return [
        {
            "slug": point.labels["slug"],
            "rank": int(point.labels["rank"]) if point.labels["rank"] else None,
            "node": point.labels["node"],
        }
        for point in series("job_failure_info", training_job=job)
    ]


def _work(series: Series, job: str) -> dict[str, dict[str, float]]:
    """Return the own work of this node's ranks in a step, seconds, by role and rank."""
    roles: dict[str, dict[str, float]] = defaultdict(dict)
    for labels, value in series("job_step_work_seconds", training_job=job):
        if value > 0:
            roles[labels["role"]][labels["rank"]] = value
    return roles


def usual(seconds: Iterable[float]) -> float:
    """Return what own work usually takes, of that of some ranks or nodes: their median, of two the
    shorter.
    """
    return statistics.median_low(seconds)
