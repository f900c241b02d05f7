"""By what each rank of this node's jobs is followed, best first: its heartbeats, NCCL's RAS, NCCL's
Inspector, or nothing but its process.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.core.collector import gauge

if TYPE_CHECKING:
    from dshealthd.findings.series import Series

FOLLOWED = gauge(
    "dshealthd_job_followed_ranks",
    "Ranks of a job on this node by what follows them: heartbeat; of the others ras (NCCL's RAS "
    "answers), elsewhere (it is queried on the node of rank 0), inspector (NCCL's Inspector), or "
    "nothing but their processes. Of a job with processes on GPUs, the ranks that have one.",
    *("training_job", "by"),
)
EXPORTED = (FOLLOWED,)
HEARTBEAT = "heartbeat"
WORDS = {
    "ras": "NCCL's RAS",
    "elsewhere": "NCCL's RAS, if the node of rank 0 can query it",
    "inspector": "NCCL's Inspector",
    "nothing": "nothing",
}
"""What follows ranks without heartbeats, in words."""


def settle(series: Series) -> None:
    """Add to `series` what follows the ranks of each job."""
    counts: Counter[str] = Counter()
    for labels, ranks in series("job_ranks"):
        counts[labels["training_job"]] += int(ranks)
    for job, launched in counts.items():
        heard = {point.labels["rank"] for point in series("job_step", training_job=job)}
        placed = {point.labels["rank"] for point in series("job_gpu_info", training_job=job)}
        ranks = len(placed) or launched
        followed = min(len(heard & placed if placed else heard), ranks)
        series.add([FOLLOWED(followed, job, HEARTBEAT)])
        if followed < ranks:
            series.add([FOLLOWED(ranks - followed, job, _otherwise(series, job))])


def _otherwise(series: Series, job: str) -> str:
    """Return what follows those ranks of a job that send no heartbeats."""
    states = {point.labels["state"] for point in series("job_nccl_ras_state", training_job=job)}
    if "answered" in states:
        return "ras"
    if any(series("job_nccl_operation_seconds", training_job=job)):
        return "inspector"
    return "elsewhere" if "elsewhere" in states else "nothing"
