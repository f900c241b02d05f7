"""What a node finds about a job that stands still, and how it shows it."""

from __future__ import annotations

import dataclasses
import math
import os
from types import SimpleNamespace

import pytest

from dshealthd.collectors.gpu import ACTIVITY, MEMORY_TOTAL, POWER, UTILIZATION
from dshealthd.collectors.gpu import POWER_LIMIT as LIMIT
from dshealthd.collectors.gpu_processes import RANK as GPU
from dshealthd.collectors.job_hang import ENDED
from dshealthd.collectors.kernel_log import EVENTS
from dshealthd.collectors.memory import OOM_KILLS as OOM
from dshealthd.collectors.software import INFO as VERSION
from dshealthd.collectors.training import (
    FINITE_STEP,
    INPUT_SECONDS,
    MEMORY,
    NONFINITE_STEP,
    STEP,
    STEP_SECONDS,
)
from dshealthd.findings.jobs import ends, hangs, losses
from dshealthd.findings.limits import Limits
from dshealthd.findings.overview import overview
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.findings.slowness import inputs
from dshealthd.findings.stalls import stalls
from dshealthd.jobs.hangs.classes import Culprit, HangClass
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.jobs.hangs.states import Work
from tests.jobs.standstills import rank_state


def standstill(reason: HangClass, *culprits: tuple[int, Culprit], size: int = 2) -> Standstill:
    """Return a job of which two ranks are here, silent for 80 s and overdue for 50."""
    ranks = tuple(rank_state(80.0, rank=rank, world_size=size) for rank in (0, 1))
    return Standstill(
        job="run-1",
        reason=reason,
        culprits=culprits,
        ranks=ranks,
        since=20.0,
        whole=size == len(ranks),
        overdue=50.0,
    )


@pytest.mark.parametrize(("size", "unseen"), [(2, ""), (4, "; this node sees 2 of 4 ranks")])
def test_an_end_that_may_follow_from_another(size: int, unseen: str) -> None:
    """A node that sees some of a job's ranks says so of the end of one of them, for which the
    others wait; a stop follows from none.
    """
    gone = standstill(HangClass.PROCESS, (1, Culprit.GONE), size=size)
    (sign,) = hangs(Series((), standstills={"run-1": gone}), 100.0)
    assert (sign.case, sign.since) == ("gone", 20.0)
    assert ("; this node sees" in sign.reason) == bool(unseen)
    assert unseen in sign.reason
    stopped = standstill(HangClass.PROCESS, (1, Culprit.STOPPED), size=size)
    (sign,) = hangs(Series((), standstills={"run-1": stopped}), 100.0)
    assert sign.reason == "rank 1 is stopped (SIGSTOP)"


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_at_different_places_without_a_culprit(size: int) -> None:
    """None is named of as many ahead as behind, nor where other nodes see the others."""
    (sign,) = hangs(
        Series((), standstills={"run-1": standstill(HangClass.DESYNC, size=size)}), 100.0
    )
    assert sign.part == ""
    assert "none is named" in sign.reason


def test_a_pause_that_waits_for_somebody_outside() -> None:
    """It is said whose answer a rank waits for, how long none was heard, and what is left."""
    still = standstill(HangClass.BETWEEN_STEPS)
    for hold, left in ((600.0, 550.0), (math.inf, None)):
        work = Work(awaits={0: "10.0.0.7:8000"})
        pause = dataclasses.replace(still, hold=hold, work=work)
        (job,) = overview(Series((), standstills={"run-1": pause}), "")
        assert (job["state"], job["hang"]) == ("stalled", None)
        assert job["stall"] == {
            "cause": "between_steps",
            "says": "between two steps: rank 0 waits for 10.0.0.7:8000",
            "silent_seconds": 80.0,
            "hung_in_seconds": left,
        }


@pytest.mark.parametrize(("machine", "release", "hangs_so"), [
    ("aarch64", "2.28.7", False),
    ("aarch64", "2.28.9+cuda13.0", True),
    ("aarch64", "2.29.2", True),
    ("aarch64", "2.29.3", False),
    ("x86_64", "2.28.9", False),
])  # fmt: skip
def test_a_release_of_nccl_that_hangs_so(
    machine: str, release: str, *, hangs_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all ranks wait at one place, a release that does that on this architecture is named as
    the likely cause, with heartbeats and without; a culprit that is seen comes before it.
    """
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    nccl = VERSION(1, "nccl", release, "", "run-1")
    waiting = Series((nccl,), standstills={"run-1": standstill(HangClass.WAITING)})
    (sign,) = hangs(waiting, 100.0)
    (job,) = overview(waiting, "")
    for says in (sign.reason, job["hang"]["says"]):
        assert (f"the likely cause is NCCL {release}" in says) == hangs_so
    stopped = standstill(HangClass.WAITING, (1, Culprit.STOPPED))
    (sign,) = hangs(Series((nccl,), standstills={"run-1": stopped}), 100.0)
    assert sign.reason == "rank 1 is stopped (SIGSTOP)"
    gpu = ("0", "GPU-0")
    waits = (UTILIZATION(1.0, *gpu), ACTIVITY(0.0, *gpu), POWER(100, *gpu))
    limit = LIMIT(700, *gpu, "enforced")
    stalled = (*waits, limit, GPU(1, "run-1", "0", *gpu), nccl)
    (sign,) = stalls(Series(stalled, Limits(), Past(), 0.0), 100.0)
    assert (f"the likely cause is NCCL {release}" in sign.reason) == hangs_so


@pytest.mark.parametrize(("killed", "rank"), [(5.9, 1), (6.1, 0)])
def test_the_end_that_others_follow_from(killed: float, rank: int) -> None:
    """An error follows from a kill within a second, which may be noticed later."""
    seen = ENDED(5.0, "run-1", "0", "failed"), ENDED(killed, "run-1", "1", "killed")
    (end,) = ends(Series(seen), 100.0)
    assert end.reason.startswith(f"rank {rank} ")


def test_a_finding_names_three_culprits() -> None:
    """Of eight that are stopped."""
    stopped = standstill(HangClass.PROCESS, *((rank, Culprit.STOPPED) for rank in range(8)))
    (sign,) = hangs(Series((), standstills={"run-1": stopped}), 100.0)
    assert sign.reason.count("rank") == 3


@pytest.mark.parametrize(("minutes", "explains"), [(14, True), (16, False)])
def test_memory_that_ran_out(minutes: int, explains: bool) -> None:  # noqa: FBT001
    """It explains the end of a rank within a quarter of an hour."""
    past, killed = Past(), ENDED(5.0, "run-1", "0", "killed")
    for minute in range(-1, minutes):
        oom = OOM(3.0 if minute < 0 else 4.0)
        list(ends(Series([oom], past=past, now=60.0 * minute), 0.0))
    (end,) = ends(Series([oom, killed], past=past, now=60.0 * minutes), 0.0)
    assert ("OOM" in end.reason) is explains


@pytest.mark.parametrize(("seconds", "first"), [(29, "rank 1"), (31, "rank 0")])
def test_oom_kill_that_is_noticed_late(seconds: int, first: str) -> None:
    """It comes before an error that is noticed earlier, unless the launcher may have killed."""
    past = Past()
    failed = ENDED(100.0, "run-1", "0", "failed")
    killed = ENDED(100.0 + seconds, "run-1", "1", "killed")
    for count in (0.0, 1.0):
        (end,) = ends(Series([OOM(count), failed, killed], past=past, now=60.0 * count), 0.0)
    assert end.reason.startswith(first)


@pytest.mark.parametrize(
    ("event", "how", "said"),
    [
        ("nccl_segfault", "crashed", "crashed in NCCL's library"),
        ("cuda_segfault", "crashed", "crashed in CUDA's libraries"),
        ("segfault", "crashed", "crashed (a signal"),
        ("nccl_segfault", "failed", "ended with an error"),
    ],
)
def test_where_a_rank_crashed(event: str, how: str, said: str) -> None:
    """The kernel's log names the library; an error is none of that."""
    past, ended = Past(), ENDED(5.0, "run-1", "0", how)
    for count in (0.0, 1.0):
        (end,) = ends(Series([EVENTS(count, event, ""), ended], past=past, now=60.0 * count), 0.0)
    assert end.reason.startswith(f"rank 0 {said}")


@pytest.mark.parametrize(("reserved", "said"), [(72e9, ""), (73e9, "held nearly all")])
def test_memory_of_the_largest_gpu(reserved: float, said: str) -> None:
    """A rank that fails with nine tenths of it reserved has probably run out of it."""
    sizes = (MEMORY_TOTAL(24e9, "0", "GPU-0"), MEMORY_TOTAL(80e9, "1", "GPU-1"))
    failed = ENDED(5.0, "run-1", "0", "failed"), MEMORY(reserved, "run-1", "0", "reserved")
    (end,) = ends(Series([*sizes, *failed], past=Past(), now=60.0), 0.0)
    assert said in end.reason
    assert bool(said) is ("memory" in end.reason)


@pytest.mark.parametrize(
    ("finite", "named"), [(60, "rank 1"), (59, "ranks 0, 1"), (None, "ranks 0, 1")]
)
def test_the_rank_whose_loss_was_lost_first(finite: float | None, named: str) -> None:
    """It is named if another still had a finite loss at the step, by what was seen of that one."""
    samples = [NONFINITE_STEP(60, "run-1", "1"), NONFINITE_STEP(61, "run-1", "0")]
    if finite is not None:
        samples += [FINITE_STEP(58, "run-1", "1"), FINITE_STEP(finite, "run-1", "0")]
    (sign,) = losses(Series(samples, past=Past(), now=0.0), 0.0)
    assert (sign.reason, sign.value) == (named, 60)


def test_the_rank_that_waits_longest_for_its_input() -> None:
    """It is the finding's value; all that wait for too long are named."""
    samples = []
    for rank, share in (("0", 0.4), ("1", 0.6), ("2", 0.5), ("3", 0.2)):
        of = "run-1", rank
        samples += [STEP(5.0, *of), STEP_SECONDS(2.0, *of), INPUT_SECONDS(2.0 * share, *of)]
    (sign,) = inputs(Series(samples, past=Past(), now=0.0), 0.0)
    assert (sign.reason, sign.value) == ("ranks 0, 1, 2", 0.6)
