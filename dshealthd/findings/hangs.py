"""A job's standstill as this node shows it: on its page, in `status` and `jobs`, and as a finding.

`jobs/hangs` judges it, with what `work` sees of the job's GPUs and files; all views show its
verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dshealthd.jobs.hangs.hang import PAUSES, PROBLEMS, HangClass, Work, explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.findings.series import Series

_BUSY = 0.95
"""Utilization of a GPU with a kernel that runs all the time, as one that waits does."""


class ShownStandstill(NamedTuple):
    """A job whose ranks here stand still."""

    cause: str
    """Its class."""
    says: str
    """The cause in words, with what this node does not see."""
    culprits: tuple[Mapping[str, str], ...]
    """Labels of the culprit ranks: `rank`, `reason`."""
    overdue: float | None
    """Seconds beyond the usual silence."""
    is_hang: bool
    left: float | None
    """Seconds until it counts as a hang; None if it never does."""
    missing: str
    """Why ranks at different places name no culprit: `tie` or `elsewhere`; otherwise empty."""


def silent(series: Series, job: str) -> ShownStandstill | None:
    """Return the standstill of a job; None while it makes progress."""
    found = next(
        (p for p in series("job_hang", training_job=job) if p.labels["class"] != HangClass.NONE),
        None,
    )
    if found is None:
        return None
    cause = found.labels["class"]
    overdue = min(
        (
            point.value
            for point in series("job_overdue_seconds", training_job=job)
            if point.value > 0
        ),
        default=None,
    )
    hold = series.value("job_hang_hold_seconds", training_job=job)
    culprits = tuple(point.labels for point in series("job_hang_culprit_info", training_job=job))
    whole = _whole(series, job)
    apart = cause == HangClass.DESYNC and not culprits
    says = explain(cause, named=bool(culprits), whole=whole)
    if cause == HangClass.WORKING and (seen := work(series, job).says):
        says = f"no step, but {seen}"
    return ShownStandstill(
        cause=cause,
        says=says,
        culprits=culprits,
        overdue=overdue,
        is_hang=found.value == 1,
        left=None if hold is None and cause in PAUSES else max(0.0, (hold or 0) - (overdue or 0)),
        missing=("tie" if whole else "elsewhere") if apart else "",
    )


def problem(reason: str) -> str:
    """Return the problem of a culprit in words; the reason itself if this release has none."""
    return PROBLEMS.get(reason, reason)


def work(series: Series, job: str) -> Work:
    """Return what the GPUs, NCCL and the files of a job on this node show."""
    moving = _moving(series, job)
    written = series.value("job_write_bytes_per_second", training_job=job)
    says = (
        "its GPUs compute"
        if any(moving.values())
        else "NCCL launches operations"
        if series.value("job_nccl_answers_without_progress", training_job=job) == 0
        else "it writes files"
        if written is not None and written > series.limits.hang_write_bytes_per_second
        else ""
    )
    waits = any(
        point.value > _BUSY and moving.get(point.labels["uuid"]) is False
        for point in series("gpu_utilization_ratio", uuid=set(moving))
    )
    return Work(says, waits)


def _moving(series: Series, job: str) -> dict[str, bool]:
    """Return for each GPU of a job here whether it reads or writes its memory, where it is known."""
    gpus = {point.labels["uuid"] for point in series("job_gpu_info", training_job=job)}
    active = series.limits.hang_memory_activity_ratio
    return {
        point.labels["uuid"]: point.value > active
        for point in series("gpu_memory_activity_ratio", uuid=gpus)
    }


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
