"""What shows whether a job whose ranks are silent is at work: GPUs, NCCL, files, sockets, CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.jobs.hangs.states import Work
from dshealthd.linux.activity import BUSY

if TYPE_CHECKING:
    from dshealthd.findings.series import Series

_BUSY = 0.95
"""Utilization of a GPU with a kernel that runs all the time, as one that waits does."""
_MOVES = (
    ("job_file_bytes_per_second", "it reads or writes files"),
    ("job_socket_bytes_per_second", "it sends or receives over the network"),
)


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
        awaits=awaited(series, job),
    )


def awaited(series: Series, job: str) -> dict[int, str]:
    """Return from whom the ranks here wait for an answer that do so from outside the job."""
    points = series("job_rank_awaits_info", training_job=job)
    return {int(point.labels["rank"]): point.labels["peer"] for point in points}


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
