"""A job's standstill as this node shows it: on its page, in `status` and `jobs`, and as a finding.

`jobs/hangs` judges it, with what `work` sees of the job's GPUs and files; all views show its
verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dshealthd.findings.settings import likely, several
from dshealthd.jobs.hangs.hang import HANGS, PROBLEMS, HangClass, Work, explain
from dshealthd.linux.activity import BUSY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    unseen: str
    """What this node does not see that may be the cause of a rank's end; empty if it sees all."""
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
        default=series.value("job_silent_overdue_seconds", training_job=job),
    )
    hold = series.value("job_hang_hold_seconds", training_job=job)
    culprits = tuple(point.labels for point in series("job_hang_culprit_info", training_job=job))
    whole = _whole(series, job)
    apart = cause == HangClass.DESYNC and not culprits
    says = explain(cause, named=bool(culprits), whole=whole)
    if cause == HangClass.WORKING and (seen := work(series, job).says):
        says = f"no step, but {seen}"
    if cause == HangClass.WAITING:
        says += likely(series, job)
    if cause == HangClass.BETWEEN_STEPS and (awaits := dict(awaited(series, job))):
        says += f": {several([f'rank {rank} waits for {peer}' for rank, peer in awaits.items()])}"
    return ShownStandstill(
        cause=cause,
        says=says,
        culprits=culprits,
        overdue=overdue,
        is_hang=found.value == 1,
        left=None
        if hold is None and cause not in HANGS
        else max(0.0, (hold or 0) - (overdue or 0)),
        unseen=consequence(series, job),
        missing=("tie" if whole else "elsewhere") if apart else "",
    )


def problem(reason: str) -> str:
    """Return the problem of a culprit in words; the reason itself if this release has none."""
    return PROBLEMS.get(reason, reason)


def work(series: Series, job: str) -> Work:
    """Return what the GPUs, NCCL, the files, the sockets and the child processes of a job on this
    node show.
    """
    computes = _gpus(series, job, "gpu_memory_activity_ratio")
    busy = _gpus(series, job, "gpu_utilization_ratio")
    active = series.limits.hang_memory_activity_ratio
    still = {rank for rank, most in computes.items() if most <= active}
    says = (
        "its GPUs compute"
        if len(still) < len(computes)
        else "NCCL launches operations"
        if series.value("job_nccl_answers_without_progress", training_job=job) == 0
        else next((says for name, says in _MOVES if _moves(series, job, name)), "")
    )
    cores = series.value("job_children_cpu_cores", training_job=job)
    return Work(
        says,
        computes=cores is not None and cores >= BUSY,
        still=frozenset(still),
        waits=frozenset(rank for rank in still if busy.get(rank, 0.0) > _BUSY),
        awaits=frozenset(rank for rank, _ in awaited(series, job)),
    )


def awaited(series: Series, job: str) -> Iterator[tuple[int, str]]:
    """Yield the ranks here that wait for an answer from outside the job, and from whom."""
    for point in series("job_rank_awaits_info", training_job=job):
        yield int(point.labels["rank"]), point.labels["peer"]


_MOVES = (
    ("job_file_bytes_per_second", "it reads or writes files"),
    ("job_socket_bytes_per_second", "it sends or receives over the network"),
)


def _moves(series: Series, job: str, name: str) -> bool:
    rate = series.value(name, training_job=job)
    return rate is not None and rate > series.limits.hang_moved_bytes_per_second


def _gpus(series: Series, job: str, name: str) -> dict[int, float]:
    """Return the highest value of a metric among the GPUs of each rank of a job here, where it is
    known of each of them.
    """
    found = {point.labels["uuid"]: point.value for point in series(name)}
    ranks: dict[int, list[float | None]] = {}
    for labels, _ in series("job_gpu_info", training_job=job):
        ranks.setdefault(int(labels["rank"]), []).append(found.get(labels["uuid"]))
    return {
        rank: max(known)
        for rank, values in ranks.items()
        if len(known := [value for value in values if value is not None]) == len(values)
    }


def consequence(series: Series, job: str) -> str:
    """Return that the end of a rank here may follow from that of one elsewhere; empty if all ranks
    are here.
    """
    here, size = _sizes(series, job)
    if size is None or here >= size:
        return ""
    return f"; this node sees {here} of {size:g} ranks: that may follow from another's end"


def _whole(series: Series, job: str) -> bool:
    """Return whether all ranks of a job are on this node, as far as their environments say."""
    here, size = _sizes(series, job)
    return size is not None and here >= size


def _sizes(series: Series, job: str) -> tuple[int, float | None]:
    """Return the ranks of a job here, and how many it has, as far as their environments say."""
    sizes = [point.value for point in series("job_world_size", training_job=job)]
    sizes += [
        float(point.labels["world_size"])
        for point in series("job_info", training_job=job)
        if point.labels["world_size"]
    ]
    ranks = {
        point.labels["rank"]
        for name in ("job_step", "job_rank_ended_timestamp_seconds")
        for point in series(name, training_job=job)
    }
    return len(ranks), max(sizes, default=None)
