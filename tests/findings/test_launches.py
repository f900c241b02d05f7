"""What launches counted from outside add to the findings of others: names where they are exact,
and nothing by themselves.
"""

from __future__ import annotations

import pytest

from dshealthd.collectors.job_environment import RANKS
from dshealthd.collectors.job_launches import AGE, BEHIND, LATE
from dshealthd.collectors.nccl_ras import LAG, TROUBLE
from dshealthd.collectors.nccl_ras import RANKS as NCCL_RANKS
from dshealthd.core.collector import Sample
from dshealthd.findings.idleness import Idleness
from dshealthd.findings.launches import late_host
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.findings.stalls import arrivals, stalls
from tests.findings.test_idleness import JOB, RESTS, gpu, rested

FLOOR = 30.0
LOSS = 0.04

HERE = RANKS(3, JOB, JOB)
GPUS = [sample for rank in range(3) for sample in gpu(rank, 1.0)]
EQUAL = "the ranks counted here have launched equally many collectives"
NAMED = "rank 1 has launched 4 collectives fewer than others here"
WAITS = "its GPUs here run kernels that move no data"


def counted(age: float, *behind: int) -> list[Sample]:
    """Return how old the last launches of ranks are, and by how many each is behind."""
    return [
        *(AGE(age, JOB, str(rank)) for rank in range(3)),
        *(BEHIND(number, JOB, str(rank)) for rank, number in enumerate(behind)),
    ]


def stalled(*samples: Sample) -> list[str]:
    """Return why the job counts as stalled, whose GPUs seem to wait."""
    series = Series([HERE, *GPUS, *samples], past=Past())
    return [sign.reason for sign in stalls(series, 0.0)]


def test_gpus_that_wait() -> None:
    """The rank that is behind is named, or that none is; nobody without an exact count."""
    assert stalled() == [WAITS]
    assert stalled(*counted(FLOOR, 0, 4, 0)) == [f"{WAITS}; {NAMED}"]
    assert stalled(*counted(FLOOR, 0, 0, 0)) == [f"{WAITS}; {EQUAL}"]
    assert stalled(*counted(FLOOR)) == [WAITS]
    assert stalled(*counted(FLOOR, 4)) == [WAITS]


def test_whom_nccl_names() -> None:
    """Ranks that NCCL says are in trouble come before those that are behind by its count, and those
    before what is counted here; without any, a communicator that does not begin says so.
    """
    of = JOB, "1", "h", "0"
    dead, late = TROUBLE(1, *of, "remote_error"), LAG(3, *of, "AllReduce")
    assert stalled(late, *counted(FLOOR, 0, 4, 0)) == ["rank 1 on h (behind)"]
    assert stalled(LAG(0, *of, "AllReduce")) == [WAITS]
    assert stalled(late, dead) == ["rank 1 on h (remote error)"]
    for known, named in (
        ([], "NCCL names none in trouble"),
        ([dead], "rank 1 on h (remote error)"),
    ):
        series = Series([NCCL_RANKS(2, JOB, "8", "init"), *known])
        (sign,) = arrivals(series, 0.0)
        assert sign.reason.endswith(f"without a step: {named}")


def test_a_job_that_launches_does_not_stall() -> None:
    """What its GPUs look like at this moment is a phase of its steps."""
    assert stalled(*counted(FLOOR - 0.1, 0, 4, 0)) == []


def test_an_old_launch_alone_is_nothing() -> None:
    """CUDA graphs launch unseen: GPUs that compute have the last word."""
    samples = [HERE, *counted(3600.0, 0, 4, 0)]
    assert [*stalls(Series(samples, past=Past()), 0.0)] == []


def test_a_job_that_rests() -> None:
    """The same where no rank uses its CPU; one that launches is at work."""
    plain = "no rank has used CPU or GPU, nor moved data"
    assert rested(Idleness(), *RESTS, *counted(100.0, 0, 4, 0)) == [f"{plain}; {NAMED}"]
    assert rested(Idleness(), *RESTS, *counted(100.0, 0, 0, 0)) == [f"{plain}; {EQUAL}"]
    assert rested(Idleness(), *RESTS, *counted(100.0)) == [plain]
    assert rested(Idleness(), *RESTS, *counted(1.0, 0, 0, 0)) == []


def test_a_rank_alone_is_compared_with_none() -> None:
    """Nor is a host, where it is not known that there are more ranks."""
    assert late_host(Series([LATE(0.0, JOB, "0")]), JOB, STEP) == ""


STEP = 0.5
LITTLE, MUCH = LOSS * STEP * 0.99, LOSS * STEP


@pytest.mark.parametrize(("late", "says"), [
    ((), ""),
    ((0.0, 0.0), ""),  # of a third one nothing is known
    ((0.0, 0.001, 0.002), "; no host here is late: GPU or network"),
    ((0.0, 0.001, LITTLE), "; no host here is late: GPU or network"),
    ((0.0, 0.001, MUCH), ""),  # it may be the host, and may not
    ((0.0, 0.0, MUCH), "; rank 2 launches 20 ms after the others (host side)"),
    ((0.032, 0.0, 0.0), "; rank 0 launches 32 ms after the others (host side)"),
    ((0.0, 0.03, 0.032), ""),  # two are late
])  # fmt: skip
def test_hosts(late: tuple[float, ...], says: str) -> None:
    """One rank that is late alone is named, if it costs as much of a step as a slow rank may."""
    samples = [LATE(value, JOB, str(rank)) for rank, value in enumerate(late)]
    assert late_host(Series([HERE, *samples]), JOB, STEP) == says
