"""What a node shows of a job that stands still, and what it sees of the job's work."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors.gpu import ACTIVITY, POWER, UTILIZATION
from dshealthd.collectors.gpu import POWER_LIMIT as LIMIT
from dshealthd.collectors.gpu_processes import RANK as GPU
from dshealthd.collectors.job_activity import AWAITS, CHILDREN, FILES, SOCKETS
from dshealthd.collectors.job_hang import CULPRIT, ENDED, HANG
from dshealthd.collectors.software import INFO as VERSION
from dshealthd.collectors.training import INFO, STEP
from dshealthd.findings.hangs import silent, work
from dshealthd.findings.jobs import ends, hangs
from dshealthd.findings.limits import Limits
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.findings.stalls import stalls

if TYPE_CHECKING:
    from dshealthd.core.collector import Sample


def series(*samples: Sample) -> Series:
    """Return what was read just now."""
    return Series(samples, Limits(), Past(), 0.0)


@pytest.mark.parametrize(("size", "unseen"), [("2", ""), ("4", "; this node sees 2 of 4 ranks")])
def test_an_end_that_may_follow_from_another(size: str, unseen: str) -> None:
    """A node that sees some of a job's ranks says so of the end of one of them; a kill or a stop
    follows from none.
    """
    seen = (
        *(STEP(7, "run-1", rank) for rank in "01"),
        INFO(1, "run-1", "torchrun", size),
        HANG(1, "run-1", "process"),
        ENDED(5.0, "run-1", "1", "failed"),
    )
    gone = CULPRIT(1, "run-1", "1", "process", "gone")
    (sign,) = hangs(series(*seen, gone), 100.0)
    (end,) = ends(series(*seen, gone), 100.0)
    for reason in (sign.reason, end.reason):
        assert ("; this node sees" in reason) == bool(unseen)
        assert unseen in reason
    stopped = CULPRIT(1, "run-1", "1", "process", "stopped")
    (sign,) = hangs(series(*seen, stopped), 100.0)
    assert sign.reason == "rank 1 is stopped (SIGSTOP)"


@pytest.mark.parametrize(
    ("machine", "release", "hangs_so"),
    [
        ("aarch64", "2.28.7", False),
        ("aarch64", "2.28.9+cuda13.0", True),
        ("aarch64", "2.29.2", True),
        ("aarch64", "2.29.3", False),
        ("x86_64", "2.28.9", False),
    ],
)
def test_a_release_of_nccl_that_hangs_so(
    machine: str, release: str, *, hangs_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all ranks wait at one place, a release that does that on this architecture is named as
    the likely cause, with heartbeats and without; a culprit that is seen comes before it.
    """
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    nccl = VERSION(1, "nccl", release, "", "run-1")
    waiting = (HANG(1, "run-1", "waiting"), nccl)
    (sign,) = hangs(series(*waiting), 100.0)
    assert (f"the likely cause is NCCL {release}" in sign.reason) == hangs_so
    (sign,) = hangs(series(*waiting, CULPRIT(1, "run-1", "1", "process", "stopped")), 100.0)
    assert sign.reason == "rank 1 is stopped (SIGSTOP)"
    gpu = ("0", "GPU-0")
    waits = (UTILIZATION(1.0, *gpu), ACTIVITY(0.0, *gpu), POWER(100, *gpu))
    stalled = series(*waits, LIMIT(700, *gpu, "enforced"), GPU(1, "run-1", "0", *gpu), nccl)
    (sign,) = stalls(stalled, 100.0)
    assert (f"the likely cause is NCCL {release}" in sign.reason) == hangs_so


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
    busy = (UTILIZATION(1.0, "2", "GPU-2"), ACTIVITY(0.5, "2", "GPU-2"))
    assert work(series(*gpus, *readings, *busy), "run-1").says == "its GPUs compute"


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (FILES(2e5, "run-1"), "it reads or writes files"),
        (SOCKETS(2e5, "run-1"), "it sends or receives over the network"),
        (FILES(5e4, "run-1"), ""),
        (SOCKETS(5e4, "run-1"), ""),
    ],
)
def test_bytes_that_move(sample: Sample, says: str) -> None:
    """A job is at work as long as its bytes move; what loggers and stores move does not count."""
    assert work(series(sample), "run-1").says == says


def test_an_answer_from_outside() -> None:
    """A rank that waits for one is in a pause that says from whom, unless it is known to be
    another.
    """
    awaits = AWAITS(1, "run-1", "0", "10.0.0.7:8000")
    assert work(series(awaits), "run-1").awaits == frozenset({0})
    assert work(series(awaits), "run-2").awaits == frozenset()
    still = silent(series(awaits, HANG(0, "run-1", "between_steps")), "run-1")
    assert still is not None
    assert still.says == "between two steps: rank 0 waits for 10.0.0.7:8000"


def test_child_processes_compute() -> None:
    """Compilers and data loaders do, from half a core on."""
    assert work(series(CHILDREN(0.6, "run-1")), "run-1").computes
    assert not work(series(CHILDREN(0.3, "run-1")), "run-1").computes
