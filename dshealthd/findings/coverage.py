"""By what each rank of this node's jobs is followed, best first: its heartbeats, NCCL's RAS, NCCL's
Inspector, its launches counted from outside, or nothing but its process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dshealthd.core.collector import gauge
from dshealthd.findings.finding import Sign
from dshealthd.findings.series import Series, short_name

FOLLOWED = gauge(
    "dshealthd_job_followed_ranks",
    "Ranks of a job on this node by how they are followed: heartbeat, ras (NCCL's RAS answers), "
    "inspector (NCCL's Inspector), launches (counted from outside), elsewhere (RAS is queried "
    "on the node of rank 0), nothing (only their processes are seen), or declined (by their "
    "user). In a job that uses GPUs, only ranks with a process on a GPU count.",
    *("training_job", "by"),
)
EXPORTED = (FOLLOWED,)
HEARTBEAT, DECLINED = "heartbeat", "declined"
WORDS = {
    "ras": "NCCL's RAS",
    "launches": "launches",
    "elsewhere": "NCCL's RAS, if the node of rank 0 can query it",
    "inspector": "NCCL's Inspector",
    "nothing": "nothing",
    DECLINED: "nothing, as their user declines heartbeats",
}
"""What follows ranks without heartbeats, in words."""


def settle(series: Series) -> None:
    """Add to `series` what follows the ranks of each job."""
    counts: Counter[str] = Counter()
    declined: Counter[str] = Counter()
    for each, name in ((counts, "job_ranks"), (declined, "job_declined_ranks")):
        for labels, ranks in series(name):
            each[labels["training_job"]] += int(ranks)
    for job, launched in counts.items():
        heard = {point.labels["rank"] for point in series("job_step", training_job=job)}
        placed = {point.labels["rank"] for point in series("job_gpu_info", training_job=job)}
        ranks = len(placed) or launched
        followed = min(len(heard & placed if placed else heard), ranks)
        series.add([FOLLOWED(followed, job, HEARTBEAT)])
        if without := min(declined[job], ranks - followed):
            series.add([FOLLOWED(without, job, DECLINED)])
        if followed + without < ranks:
            series.add([FOLLOWED(ranks - followed - without, job, _otherwise(series, job))])


def _otherwise(series: Series, job: str) -> str:
    """Return what follows those ranks of a job that send no heartbeats."""
    states = {point.labels["state"] for point in series("job_nccl_ras_state", training_job=job)}
    if "answered" in states:
        return "ras"
    if series.has("job_nccl_operation_seconds", training_job=job):
        return "inspector"
    if series.has("job_launches", training_job=job):
        return "launches"
    return "elsewhere" if "elsewhere" in states else "nothing"


def unfollowed(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose ranks a site means to follow, and too few of which are."""
    limit, name = "followed_ratio", short_name(FOLLOWED)
    jobs: dict[str, Counter[str]] = {}
    for labels, ranks in series(name):
        jobs.setdefault(labels["training_job"], Counter())[labels["by"]] += int(ranks)
    for job, by in jobs.items():
        wanted = by.total() - by[DECLINED]
        if wanted and by[HEARTBEAT] / wanted < series.limit(limit):
            yield Sign(
                "DshealthdJobNotFollowed",
                job=job,
                value=by[HEARTBEAT] / wanted,
                limit=limit,
                source=name,
            )


RULES = (unfollowed,)
