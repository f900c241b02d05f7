"""What launches that are counted from outside say of a job, beside the signs of others: an old
launch alone says nothing, as CUDA graphs launch unseen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural, several
from dshealthd.jobs.hangs.silence import FLOOR
from dshealthd.jobs.own_work import LOSS

if TYPE_CHECKING:
    from dshealthd.findings.series import Series


def launches_lately(series: Series, job: str) -> bool:
    """Return whether a rank of the job here launches: a queue of launches is full within seconds
    once the GPU waits.
    """
    return any(age < FLOOR for age in _ages(series, job))


def ranks_behind(series: Series, job: str) -> str:
    """Return which ranks of a job are behind for good, or that none is; empty where that is not
    exact, or ranks launch.
    """
    counted = _by_rank(series, "job_launches_behind", job)
    if len(counted) < 2 or launches_lately(series, job):  # noqa: PLR2004 - one cannot be compared
        return ""
    behind = [
        f"rank {rank} has launched {plural(int(number), 'collective')} fewer than others here"
        for rank, number in counted.items()
        if number > 0
    ]
    return f"; {several(behind) or 'the ranks counted here have launched equally many collectives'}"


def late_host(series: Series, job: str, step: float) -> str:
    """Return which host of a job is late in steps of so many seconds, or that none here is; empty
    if that is not clear. A rank counts as late if that costs as much as a slow rank may.
    """
    late = _by_rank(series, "job_launch_lateness_seconds", job)
    ranks = sum(value for _, value in series("job_ranks", training_job=job))
    if len(late) < max(2, ranks):
        return ""
    (_, before), (last, most) = sorted(late.items(), key=lambda entry: entry[1])[-2:]
    if most - before >= LOSS * step:
        return f"; rank {last} launches {(most - before) * 1e3:.0f} ms after the others (host side)"
    return "; no host here is late: GPU or network" if most < LOSS * step else ""


def _ages(series: Series, job: str) -> list[float]:
    return list(_by_rank(series, "job_launch_age_seconds", job).values())


def _by_rank(series: Series, name: str, job: str) -> dict[int, float]:
    return {int(labels["rank"]): value for labels, value in series(name, training_job=job)}
