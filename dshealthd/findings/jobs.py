"""Findings about the training jobs on this node, from their ranks here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.collector import gauge
from dshealthd.findings.finding import Sign
from dshealthd.findings.hangs import silent
from dshealthd.findings.host import over
from dshealthd.findings.limits import source as limit_source
from dshealthd.jobs.hangs.hang import HangClass

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.findings.series import Series

UTILIZATION = gauge(
    "dshealthd_training_gpu_utilization_ratio", "Mean utilization of the GPUs with a process."
)
"""Derived here, and kept for ten minutes; not exported."""
SKIP_WINDOWS = ((60.0, 20), (300.0, 10))
"""Seconds in which steps are counted, and how many there must be: the first that has as many."""
SETTLED_STEPS = 100
"""Steps in which the loss scale finds its place."""


def hangs(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings about jobs in which no rank here makes progress, and stuck collectives."""
    still = set()
    for job in sorted({point.labels["training_job"] for point in series("job_hang")}):
        found = silent(series, job)
        if found is None:
            continue
        still.add(job)
        if found.cause == HangClass.DEBUGGER:
            for culprit in found.culprits:
                yield Sign(
                    alert="DshealthdRankInDebugger",
                    part=f"rank {culprit['rank']} of {job}",
                    job=job,
                    source="dshealthd_job_hang_culprit_info",
                )
        if not found.is_hang:
            continue
        culprit = found.culprits[0] if found.culprits else {"reason": found.missing}
        yield Sign(
            alert="DshealthdJobHang",
            labels={"training_job": job, "class": found.cause, **culprit},
            value=found.overdue,
            limit=0,
            limit_source="dshealthd_job_step_bound_seconds",
            source="dshealthd_job_overdue_seconds",
            since=_last_heartbeat(series, job)
            or (None if found.overdue is None else wall - found.overdue),
        )
    name, limit = "job_nccl_answers_without_progress", "ras_idle_answers"
    for labels, value in series(name):
        job = labels["training_job"]
        behind = any(
            point.value > 0 for point in series("job_nccl_rank_operations_behind", training_job=job)
        )
        named = behind or any(series("job_nccl_rank_trouble_info", training_job=job))
        if value >= series.limit(limit) and named and job not in still:
            yield Sign(
                alert="DshealthdCollectiveStuck",
                labels=labels,
                value=value,
                limit=series.limit(limit),
                limit_source=limit_source(limit),
                source=f"dshealthd_{name}",
            )


def _last_heartbeat(series: Series, job: str) -> float | None:
    """Return the Unix time in seconds of the last heartbeat of any rank of the job."""
    heard = (point.value for point in series("job_heartbeat_timestamp_seconds", training_job=job))
    return max(heard, default=None)


def losses(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs with ranks whose last loss was NaN or infinite."""
    for labels, value in series("job_loss_finite"):
        if value != 0:
            continue
        step = series.value("job_step", **labels)
        lost = series.value("job_nonfinite_losses_total", **labels)
        yield Sign(
            alert="DshealthdLossNotFinite",
            labels=labels,
            # The step after which it began, as in `dshealthd:job:nonfinite_since`.
            value=0 if step is None or lost is None else step - lost,
            source="dshealthd_job_step",
        )


def skips(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs that skip many of their last steps, as gradients overflow."""
    # torch's GradScaler falls to a scale of 0 within seconds. It then skips all steps, and none is
    # counted, because a skipped step is detected by the falling scale.
    ratios = dict.fromkeys(_jobs_at_zero(series), 1.0)
    decided: set[tuple[str, str]] = set()
    for seconds, fewest in SKIP_WINDOWS:
        steps = {_rank(labels): rise for labels, rise in series.rise("job_step", seconds)}
        for labels, rise in series.rise("job_skipped_steps_total", seconds):
            rank, step = _rank(labels), series.value("job_step", **labels)
            if steps.get(rank, 0.0) <= fewest or rank in decided or step is None:
                continue
            decided.add(rank)
            if step > SETTLED_STEPS:
                job = labels["training_job"]
                ratios[job] = max(ratios.get(job, 0.0), rise / steps[rank])
    for job, ratio in ratios.items():
        yield from over(
            series,
            "DshealthdStepsSkipped",
            ratio,
            "skipped_steps_ratio",
            "job_skipped_steps_total",
            part=job,
            job=job,
        )


def _jobs_at_zero(series: Series) -> set[str]:
    """Return the jobs whose loss scale is 0 on any rank here."""
    return {labels["training_job"] for labels, scale in series("job_loss_scale") if scale == 0}


def _rank(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels["training_job"], labels["rank"]


def starved(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield the finding that GPUs with a process hardly compute while tasks queue for the CPUs."""
    used = series.parts("gpu_compute_processes", "gpu", "uuid")
    now = [
        point.value
        for point in series("gpu_utilization_ratio")
        if (point.labels["gpu"], point.labels["uuid"]) in used
    ]
    if not now:
        return
    series.add([UTILIZATION(sum(now) / len(now))])
    name = UTILIZATION.name.removeprefix("dshealthd_")
    queued = [
        point.value
        for point in series.mean(
            "pressure_stalled_ratio", 600.0, full=True, resource="cpu", tasks="some"
        )
    ]
    limits = series.limits
    for _, computed in series.mean(name, 600.0, full=True):
        waiting = any(ratio > limits.cpu_pressure_ratio for ratio in queued)
        if waiting and computed < limits.gpu_utilization_training_ratio:
            yield Sign(
                alert="DshealthdGpusStarved",
                value=computed,
                limit=limits.gpu_utilization_training_ratio,
                limit_source=limit_source("gpu_utilization_training_ratio"),
                source="dshealthd_gpu_utilization_ratio",
            )


RULES = (hangs, losses, skips, starved)
