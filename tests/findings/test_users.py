"""The job that a finding names."""

from __future__ import annotations

import pytest

from dshealthd.collectors.gpu_processes import RANK
from dshealthd.collectors.job_environment import RANKS
from dshealthd.collectors.training import STEP
from dshealthd.core.collector import Sample
from dshealthd.findings.finding import Sign
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.findings.users import Users


def on_gpu(job: str, rank: int, gpu: str = "0") -> Sample:
    """Return a rank on a GPU."""
    return RANK(1.0, job, str(rank), gpu, f"GPU-{gpu}")


def named(*samples: Sample, **labels: str) -> str:
    """Return the job that is named with a sign of these labels."""
    return Users(Series(samples)).of(Sign("DshealthdGpuLost", labels=labels))


ONE = {"gpu": "0", "uuid": "GPU-0"}


@pytest.mark.parametrize(("samples", "job"), [
    ((), ""),
    ((on_gpu("b", 0),), "b"),
    ((on_gpu("b", 0), on_gpu("a", 0)), "a"),
    ((on_gpu("b", 0), on_gpu("b", 1), on_gpu("a", 0)), "b"),
    # Of each rank elsewhere the GPU is known; or not, and then it may be this one.
    ((on_gpu("b", 0, "1"), RANKS(1.0, "b", "b")), ""),
    ((on_gpu("b", 0, "1"), RANKS(2.0, "b", "b")), "b"),
    ((on_gpu("b", 0, "1"), STEP(5.0, "b", "0"), STEP(5.0, "b", "1")), "b"),
    ((RANKS(0.0, "b", "b"),), "b"),
])  # fmt: skip
def test_job_of_a_gpu(samples: tuple[Sample, ...], job: str) -> None:
    """The one with most ranks on it, of as many the first by name."""
    assert named(*samples, **ONE) == job


@pytest.mark.parametrize(
    ("labels", "job"),
    [({"gpu": "1", "uuid": "GPU-0"}, "a"), ({"gpu": "1"}, "b"), ({}, "a"), ({"gpu": "7"}, "")],
)
def test_which_gpu_it_is(labels: dict[str, str], job: str) -> None:
    """By its UUID where a series has it, as indices shift; without a GPU, the node's job."""
    samples = on_gpu("a", 0), on_gpu("a", 1), on_gpu("b", 0, "1")
    assert named(*samples, **labels) == job


@pytest.mark.parametrize(("seconds", "job"), [(55.0, "a"), (70.0, "")])
def test_a_job_that_has_just_ended(seconds: float, job: str) -> None:
    """A fault may have ended it: for a minute."""
    past = Past()
    for now, samples in ((0.0, [on_gpu("a", 0)]), (seconds, [])):
        users = Users(Series(samples, past=past, now=now))
    assert users.of(Sign("DshealthdGpuLost", labels=ONE)) == job
