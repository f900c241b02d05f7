"""A hang as this node shows it: on its page, in `status` and `jobs`, and as a finding.

The ranks of a job may be silent for a while without a hang. This node shows one when the alert for
it would fire too, as far as one node can know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dshealthd.jobs.hangs.hang import BETWEEN_STEPS, PROBLEMS, HangClass, explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.findings.series import Series


class ShownHang(NamedTuple):
    """A job whose ranks here have all been silent for longer than usual."""

    cause: str
    """The class of the hang."""
    says: str
    """The cause in words, with what this node does not see."""
    culprits: tuple[Mapping[str, str], ...]
    """Labels of the culprit ranks: `rank`, `reason`."""
    overdue: float | None
    """Seconds beyond the usual silence."""
    hold: float
    """Seconds that it must be overdue."""
    pause: str
    """What it may be instead of a hang; empty once it is a hang."""
    missing: str
    """Why ranks at different places name no culprit: `tie` or `elsewhere`; otherwise empty."""

    @property
    def left(self) -> float:
        """Seconds until it counts as a hang."""
        return max(0.0, self.hold - (self.overdue or 0.0))


def silent(series: Series, job: str) -> ShownHang | None:
    """Return the hang of a job, or what may become one; None while the job makes progress."""
    cause = next(
        (p.labels["class"] for p in series("job_hang", training_job=job) if p.value == 1), None
    )
    if cause is None:
        return None
    overdue = min(
        (
            point.value
            for point in series("job_overdue_seconds", training_job=job)
            if point.value > 0
        ),
        default=None,
    )
    hold = series.value("job_hang_hold_seconds", training_job=job) or 0.0
    pause = ""
    if overdue is not None and overdue < hold:
        pause = "between two steps" if hold == BETWEEN_STEPS else "waiting"
    elif (
        overdue is not None and overdue < series.limits.hang_moving_seconds and _moves(series, job)
    ):
        hold, pause = series.limits.hang_moving_seconds, "no step, but its GPUs or NCCL are at work"
    culprits = tuple(point.labels for point in series("job_hang_culprit_info", training_job=job))
    whole = _whole(series, job)
    apart = cause == HangClass.DESYNC and not culprits
    return ShownHang(
        cause=cause,
        says=explain(cause, named=bool(culprits), whole=whole),
        culprits=culprits,
        overdue=overdue,
        hold=hold,
        pause=pause,
        missing=("tie" if whole else "elsewhere") if apart else "",
    )


def problem(reason: str) -> str:
    """Return the problem of a culprit in words; the reason itself if this release has none."""
    return PROBLEMS.get(reason, reason)


def _whole(series: Series, job: str) -> bool:
    """Return whether all ranks of a job are on this node, as far as their environments say."""
    sizes = [point.value for point in series("job_world_size", training_job=job)]
    sizes += [
        float(point.labels["world_size"])
        for point in series("job_info", training_job=job)
        if point.labels["world_size"]
    ]
    here = {point.labels["rank"] for point in series("job_step", training_job=job)}
    return bool(sizes) and len(here) >= max(sizes)


def _moves(series: Series, job: str) -> bool:
    """Return whether NCCL launches operations for a job, or one of its GPUs here moves memory."""
    gpus = {point.labels["uuid"] for point in series("job_gpu_info", training_job=job)}
    active = series.limits.hang_memory_activity_ratio
    return series.value("job_nccl_answers_without_progress", training_job=job) == 0 or any(
        point.value > active for point in series("gpu_memory_activity_ratio", uuid=gpus)
    )
