"""What follows the ranks of a job, from what the collectors of its node export."""

from __future__ import annotations

import pytest

from dshealthd.collectors.gpu_processes import RANK
from dshealthd.collectors.job_environment import DECLINED, RANKS
from dshealthd.collectors.job_launches import LAUNCHES
from dshealthd.collectors.nccl_inspector import SECONDS
from dshealthd.collectors.nccl_ras import STATE
from dshealthd.collectors.training import STEP
from dshealthd.core.collector import Sample
from dshealthd.findings import coverage
from dshealthd.findings.series import Series

JOB = "slurm-1"


def followed(*samples: Sample) -> dict[str, float]:
    """Return the ranks of the job by what follows them."""
    series = Series(samples)
    coverage.settle(series)
    return {labels["by"]: value for labels, value in series("job_followed_ranks", training_job=JOB)}


def heard(*ranks: int) -> list[Sample]:
    """Return that these ranks send heartbeats."""
    return [STEP(7, JOB, str(rank)) for rank in ranks]


def on_gpus(*ranks: int) -> list[Sample]:
    """Return that these ranks have a process on a GPU."""
    return [RANK(1, *_labels(rank)) for rank in ranks]


def _labels(rank: int) -> list[str]:
    known = {"training_job": JOB, "rank": str(rank), "gpu": str(rank)}
    return [known.get(name, f"{name}-{rank}") for name in RANK.dimensions]


INSPECTOR = SECONDS(0.1, *(JOB if name == "training_job" else "-" for name in SECONDS.dimensions))


@pytest.mark.parametrize(("samples", "expected"), [
    ([], {}),
    ([RANKS(2, JOB, "run")], {"heartbeat": 0, "nothing": 2}),
    ([RANKS(2, JOB, "run"), *heard(0, 1)], {"heartbeat": 2}),
    ([RANKS(1, JOB, "a"), RANKS(2, JOB, "b"), *heard(0)], {"heartbeat": 1, "nothing": 2}),
    ([RANKS(8, JOB, "run"), *on_gpus(0, 1), *heard(0, 5)], {"heartbeat": 1, "nothing": 1}),
    ([RANKS(2, JOB, "run"), STATE(1, JOB, "answered")], {"heartbeat": 0, "ras": 2}),
    ([RANKS(2, JOB, "run"), STATE(1, JOB, "disabled")], {"heartbeat": 0, "nothing": 2}),
    ([RANKS(2, JOB, "run"), STATE(1, JOB, "elsewhere")], {"heartbeat": 0, "elsewhere": 2}),
    (
        [RANKS(2, JOB, "run"), STATE(1, JOB, "elsewhere"), INSPECTOR],
        {"heartbeat": 0, "inspector": 2},
    ),
    (
        [RANKS(2, JOB, "run"), STATE(1, JOB, "elsewhere"), LAUNCHES(5, JOB, "0", "send")],
        {"heartbeat": 0, "launches": 2},
    ),
    ([RANKS(2, "another", "run")], {}),
    ([RANKS(2, JOB, "run"), DECLINED(2, JOB, "run")], {"heartbeat": 0, "declined": 2}),
    (
        [RANKS(4, JOB, "a"), DECLINED(1, JOB, "a"), *heard(0, 1)],
        {"heartbeat": 2, "declined": 1, "nothing": 1},
    ),
    ([RANKS(2, JOB, "run"), DECLINED(1, JOB, "run"), *heard(0, 1)], {"heartbeat": 2}),
])  # fmt: skip
def test_followed(samples: list[Sample], expected: dict[str, float]) -> None:
    """The best counts for each rank; ranks without a GPU do not, where others have one."""
    assert followed(*samples) == expected
