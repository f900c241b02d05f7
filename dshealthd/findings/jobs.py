"""Findings about the training jobs on this node: hung, failed, or training nothing any more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING

from dshealthd.core.collector import gauge
from dshealthd.core.text import MOST_NAMED
from dshealthd.findings.finding import Sign
from dshealthd.findings.limits import source as limit_source
from dshealthd.findings.past import HOUR
from dshealthd.findings.series import Series, by, keyed, over, short_name, some
from dshealthd.findings.settings import likely, ranks_named
from dshealthd.jobs.hangs.classes import Culprit, HangClass
from dshealthd.jobs.hangs.exits import AT_ONCE, FAILURES, first_end

if TYPE_CHECKING:
    from dshealthd.jobs.hangs.judge import Standstill

NORM = gauge(
    "dshealthd_attempt_gradient_norm",
    "Median of the ranks' norms.",
    *("training_job", "attempt"),
)
"""Derived here, for their past; not exported."""
SEGFAULTS = {"nccl_segfault": "NCCL's library", "cuda_segfault": "CUDA's libraries"}
"""Events of the kernel log that say where a process crashed."""
SKIP_WINDOWS = ((60.0, 20), (300.0, 10))
"""Seconds in which steps are counted, and how many there must be: the first that has as many."""
SETTLED_STEPS = 100
"""Steps in which the loss scale finds its place."""
BEFORE_END = 900.0
"""Seconds within which memory that ran out explains the end of a rank."""
NORM_SECONDS = 900.0
"""Seconds for which the gradient norm must stay high: it spikes in healthy training, too."""
GRACE = 30.0
"""`AT_ONCE` where the kernel reports an OOM kill: a node without memory notices it seconds later.
Launchers leave ranks at least that long before SIGKILL (torchrun, DeepSpeed, Slurm, Kubernetes).
"""


def hangs(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs in which no rank here makes progress."""
    for job, found in series.standstills.items():
        named = ", ".join(f"rank {rank} {one.words}" for rank, one in found.culprits[:MOST_NAMED])
        if found.reason is HangClass.DEBUGGER:
            yield Sign("DshealthdRankInDebugger", named, job=job, source="job_hang_culprit_info")
        if not found.shown:
            continue
        case = next((str(one) for _, one in found.culprits), str(found.reason))
        if case == Culprit.GONE:
            named += _consequence(found)
        yield Sign(
            "DshealthdJobHang",
            named or explanation(series, job, found),
            job=job,
            case=case,
            value=found.overdue,
            source="job_overdue_seconds",
            since=found.since,
        )


def explanation(series: Series, job: str, found: Standstill) -> str:
    """Return what a job's standstill looks like, with a release of NCCL that is known for it."""
    known = likely(series, job) if found.reason is HangClass.WAITING else ""
    return found.explanation + known


def _consequence(found: Standstill) -> str:
    """Return that the end of a rank here may follow from that of one elsewhere; empty if all ranks
    are here.
    """
    size = max((rank.world_size or 0 for rank in found.ranks), default=0)
    here = len({rank.rank for rank in found.ranks})
    if here >= size:
        return ""
    return f"; this node sees {here} of {size} ranks: that may follow from another's end"


def ends(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings about jobs of which the first rank to end here ended by a failure."""
    events = "kernel_events_total"
    logged = (
        library
        for event, library in SEGFAULTS.items()
        if some(series.rise(events, BEFORE_END, event=event))
    )
    where = next(logged, "")
    killed = some(series.rise("oom_kills_total", BEFORE_END))
    memory = series.highest("job_memory_bytes", BEFORE_END, type="reserved")
    reserved = keyed(memory, "training_job", "rank")
    total = max((value for _, value in series("gpu_memory_total_bytes")), default=math.inf)
    ended: dict[str, list[tuple[float, Mapping[str, str]]]] = {}
    alert, name = "DshealthdJobFailed", "job_rank_ended_timestamp_seconds"
    for labels, at in series(name):
        ended.setdefault(labels["training_job"], []).append((at, labels))
    heard = ended.keys() | {labels["training_job"] for labels, _ in series("job_step")}
    for labels, ago in series("job_rank_trouble_seconds", what={"killed", "crashed"}):
        job = labels["training_job"]
        if job not in heard and not series.has("job_watchdog_seconds", training_job=job):
            ended.setdefault(job, []).append((wall - ago, {**labels, "how": labels["what"]}))
    # The kernel's log names no job.
    ranks_before = list(series.highest("job_ranks", BEFORE_END))
    here = {labels["training_job"] for labels, _ in ranks_before}
    alone = len(here | ended.keys()) == 1
    for job, ranks in ended.items():
        at, labels = first_end(ranks, itemgetter("how"), GRACE if killed else AT_ONCE)
        if (how := labels["how"]) not in FAILURES:
            continue
        said = FAILURES[how]
        if how == "killed" and killed:
            said = "was killed, and the kernel reports an OOM kill here"
        elif how == "crashed" and where and alone:
            said = f"crashed in {where}, by the kernel's log"
        elif (
            how == "failed"
            and reserved.get(_rank(labels), 0.0) > series.limits.gpu_memory_held_ratio * total
        ):
            said = "ended with an error while PyTorch held nearly all of its GPU's memory"
        yield Sign(alert, f"rank {labels['rank']} {said}", job=job, value=at, source=name, since=at)
    # Without heartbeats nobody knows which process it was, unless ranks of the only job here are
    # gone.
    gone = any((series.value("job_ranks", **labels) or 0.0) < most for labels, most in ranks_before)
    if where and gone and alone and here.isdisjoint(heard | ended.keys()):
        (job,) = here
        yield Sign(
            alert, f"a process crashed in {where}, by the kernel's log", job=job, source=events
        )


def losses(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs with ranks whose last loss was NaN or infinite: about those which
    lost it while another still had a finite one, or else about all.
    """
    lost: dict[str, dict[str, float]] = {}
    for labels, step in series("job_nonfinite_loss_step"):
        job, rank = _rank(labels)
        lost.setdefault(job, {})[rank] = step
    last_finite = by(series("job_finite_loss_step"), "training_job", max)
    for job, ranks in lost.items():
        first = [rank for rank, step in ranks.items() if step <= last_finite.get(job, 0.0)]
        alert, named = "DshealthdLossNotFinite", ranks_named(first or ranks)
        begun = min(ranks.values())
        yield Sign(alert, named, job=job, value=begun, source="job_nonfinite_loss_step")


def gradients(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose gradients have grown far beyond their usual size."""
    # An infinite one is that of a step that is skipped.
    finite = (point for point in series("job_gradient_norm") if math.isfinite(point.value))
    norms = by(finite, "training_job", statistics.median)
    series.add(NORM(norm, job, attempt(series, job)) for job, norm in norms.items())
    limit, name = "gradient_norm_ratio", short_name(NORM)
    least = keyed(series.lowest(name, NORM_SECONDS, full=True), "training_job", "attempt")
    lost = {labels["training_job"] for labels, _ in series("job_nonfinite_loss_step")}
    for labels, usual in series.usual(name, HOUR, series.limit(limit)):
        job, number = labels["training_job"], labels["attempt"]
        lowest = least.get((job, number), 0.0) if number == attempt(series, job) else 0.0
        if usual > 0 and lowest > series.limit(limit) * usual and job not in lost:
            yield Sign(
                "DshealthdGradientNormHigh",
                job=job,
                value=lowest,
                limit=series.limit(limit) * usual,
                limit_source=limit_source(limit),
                source="job_gradient_norm",
            )


def attempt(series: Series, job: str) -> str:
    """Return the number of a job's attempt, empty if unknown. What was usual in one is not in
    another: an allocation may train one model after another, and a restart has other ranks.
    """
    number = series.value("job_attempts", training_job=job)
    return "" if number is None else f"{number:.0f}"


def skips(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs that skip many of their last steps, as gradients overflow."""
    # torch's GradScaler falls to a scale of 0 within seconds. It then skips all steps, and none is
    # counted, because a skipped step is detected by the falling scale.
    ratios = {labels["training_job"]: 1.0 for labels, at in series("job_loss_scale") if at == 0}
    decided: set[tuple[str, str]] = set()
    for seconds, fewest in SKIP_WINDOWS:
        steps = keyed(series.rise("job_step", seconds), "training_job", "rank")
        for labels, rise in series.rise("job_skipped_steps_total", seconds):
            rank, step = _rank(labels), series.value("job_step", **labels)
            if steps.get(rank, 0.0) <= fewest or rank in decided or step is None:
                continue
            decided.add(rank)
            if step > SETTLED_STEPS:
                job = labels["training_job"]
                ratios[job] = max(ratios.get(job, 0.0), rise / steps[rank])
    alert, limit, name = "DshealthdStepsSkipped", "skipped_steps_ratio", "job_skipped_steps_total"
    for job, ratio in ratios.items():
        yield from over(series, alert, ratio, limit, name, job=job)


def _rank(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels["training_job"], labels["rank"]


RULES = (hangs, ends, losses, gradients, skips)
