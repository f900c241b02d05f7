"""What a node sees of a job's work."""

from __future__ import annotations

import pytest

from dshealthd.collectors.gpu import ACTIVITY, UTILIZATION
from dshealthd.collectors.gpu_processes import RANK as GPU
from dshealthd.collectors.job_activity import AWAITS, CHILDREN, FILES, SOCKETS
from dshealthd.core.collector import Sample
from dshealthd.findings.series import Series
from dshealthd.findings.work import work


def series(*samples: Sample) -> Series:
    """Return what was read just now."""
    return Series(samples)


def test_what_gpus_show_of_each_rank() -> None:
    """A rank waits in a kernel, does nothing, or computes; of a GPU that is not read, nothing is
    known.
    """
    gpus = [GPU(1, "run-1", str(rank), str(rank), f"GPU-{rank}") for rank in range(4)]
    readings = (
        *(UTILIZATION(1.0, "0", "GPU-0"), ACTIVITY(0.0, "0", "GPU-0")),
        *(UTILIZATION(0.0, "1", "GPU-1"), ACTIVITY(0.0, "1", "GPU-1")),
    )
    found = work(series(*gpus, *readings), "run-1")
    assert (found.says, found.still, found.waits) == ("", frozenset({0, 1}), frozenset({0}))
    for ratio, waits in ((0.94, False), (0.96, True)):
        spins = UTILIZATION(ratio, "1", "GPU-1"), ACTIVITY(0.0, "1", "GPU-1")
        assert (1 in work(series(*gpus, *spins), "run-1").waits) is waits
    busy = (UTILIZATION(1.0, "2", "GPU-2"), ACTIVITY(0.5, "2", "GPU-2"))
    assert work(series(*gpus, *readings, *busy), "run-1").says == "its GPUs compute"


@pytest.mark.parametrize(("sample", "says"), [
    (FILES(2e5, "run-1"), "it reads or writes files"),
    (SOCKETS(2e5, "run-1"), "it sends or receives over the network"),
    (FILES(5e4, "run-1"), ""),
    (SOCKETS(5e4, "run-1"), ""),
])  # fmt: skip
def test_bytes_that_move(sample: Sample, says: str) -> None:
    """A job is at work as long as its bytes move; what loggers and stores move does not count."""
    assert work(series(sample), "run-1").says == says


def test_an_answer_from_outside() -> None:
    """Whose answer a rank waits for is known of its own job alone."""
    awaits = AWAITS(1, "run-1", "0", "10.0.0.7:8000")
    assert work(series(awaits), "run-1").awaits == {0: "10.0.0.7:8000"}
    assert work(series(awaits), "run-2").awaits == {}


def test_child_processes_compute() -> None:
    """Compilers and data loaders do, from half a core on."""
    assert work(series(CHILDREN(0.6, "run-1")), "run-1").computes
    assert not work(series(CHILDREN(0.3, "run-1")), "run-1").computes
