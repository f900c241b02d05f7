"""When rounds may use the GPUs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest

from dshealthd.collectors.gpu import MODE
from dshealthd.collectors.gpu_processes import PROCESSES
from dshealthd.collectors.job_environment import RANKS
from dshealthd.collectors.training import STEP
from dshealthd.core.collector import Reason, Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed, not_available
from dshealthd.core.snapshot import Snapshot
from dshealthd.probe.options import PolicyOptions
from dshealthd.probe.policy import (
    BUSY,
    DUTY,
    EXCLUSIVE,
    NEVER,
    RELEASED,
    TRAINING,
    UNKNOWN,
    GpuOccupancy,
    Policy,
)
from tests.probe.peering import Time
from tests.probe.services import snapshot

SAVED = 120.0


def found(*samples: Sample) -> CollectionResult:
    """Return what a collector found."""
    return CollectionResult(CollectionOutcome.OK, samples)


def policy(shot: Snapshot, clock: Time | None = None, **given: str) -> Policy:
    """Return a policy over what the collectors last saw."""
    options = PolicyOptions(**given)  # type: ignore[arg-type] # options by name
    return Policy(options, GpuOccupancy(shot, time.monotonic), clock or Time())


def idle_node(*, gpus: bool = True) -> Snapshot:
    """Return what collectors last saw of a node on which nothing runs."""
    shot = snapshot({"0": 0} if gpus else None)
    shot.expect("job_environment", 1000.0)
    shot.put("job_environment", found())
    return shot


def test_idle() -> None:
    """By default a round may use the GPUs only while no process computes on any of them."""
    assert policy(snapshot({"0": 0, "1": 0})).objection(scheduled=True) == ""
    assert policy(snapshot({"0": 0, "1": 1})).objection(scheduled=True) == BUSY
    assert policy(snapshot({"0": 1}), gpus="always").objection(scheduled=True) == ""
    assert policy(snapshot({"0": 0}), gpus="never").objection(scheduled=True) == NEVER


@pytest.mark.parametrize(("collector", "result", "objection"), [
    ("job_environment", found(), ""),
    ("job_environment", found(RANKS(4, "run-1", "r")), TRAINING),
    ("training", found(STEP(7, "run-1", "0")), TRAINING),
    ("job_environment", failed(Reason.TIMEOUT, "hangs"), UNKNOWN),
    ("job_environment", None, UNKNOWN),
    ("training", failed(Reason.IO_ERROR, "no socket"), ""),
])  # fmt: skip
def test_no_round_beside_a_training_on_cpus(
    collector: str, result: CollectionResult | None, objection: str
) -> None:
    """Ranks on a node without GPUs need its CPUs and its network; unknown counts as busy. On one
    with GPUs, ranks are about to use them: those that start have no context yet.
    """
    shot = snapshot()
    shot.expect(collector, 1000.0)
    if result is not None:
        shot.put(collector, result)
    assert policy(shot).objection(scheduled=True) == objection
    gpus = snapshot({"0": 0})
    gpus.expect(collector, 1000.0)
    if result is not None:
        gpus.put(collector, result)
    expected = BUSY if objection == TRAINING else ""  # of what is unknown the GPUs tell
    assert policy(gpus).objection(scheduled=True) == expected


def test_unknown_counts_as_busy() -> None:
    """If a collector fails, is off, has not run or misses a GPU, rounds use none."""
    failing = snapshot({"0": 0})
    failing.put("gpu_processes", failed(Reason.TIMEOUT, "hangs"))
    off = snapshot({"0": 0})
    off.forget("gpu_processes")
    early = Snapshot(time.monotonic, time.time)
    early.expect("gpu_processes", 10.0)
    early.expect("gpu_bus", 10.0)
    fewer = snapshot({"0": 0, "1": 0})
    fewer.put("gpu_processes", snapshot({"0": 0})["gpu_processes"].result)
    for shot in (failing, off, early, fewer):
        assert policy(shot).objection(scheduled=True) == UNKNOWN


def test_released_gpus_are_not_used() -> None:
    """While an operator has the GPU collectors off to unload the driver, no GPU is used."""
    shot = snapshot({"0": 0})
    shot.put("gpu_processes", not_available("released by /run/dshealthd/release-gpus"))
    assert policy(shot).objection(scheduled=True) == RELEASED


@pytest.mark.parametrize(("mode", "objection"), [
    ("default", ""),
    ("exclusive_process", EXCLUSIVE),
    ("prohibited", EXCLUSIVE),
    ("", ""),
])  # fmt: skip
def test_no_round_on_a_gpu_that_takes_one_process(mode: str, objection: str) -> None:
    """A worker there would keep a job that starts meanwhile off its GPU, which ends the job."""
    shot = snapshot({"0": 0, "1": 0})
    shot.expect("gpu", 1000.0)
    modes = [
        MODE(1, gpu, "u", "on", each, *[""] * 4) for gpu, each in (("0", "default"), ("1", mode))
    ]
    shot.put("gpu", found(*modes))
    assert policy(shot).objection(scheduled=True) == objection


@pytest.mark.parametrize(("collector", "result", "objection"), [
    ("gpu_processes", found(PROCESSES(1, "0", "GPU-0")), BUSY),
    ("gpu_processes", found(PROCESSES(0, "0", "GPU-0")), ""),
    ("job_environment", found(RANKS(4, "run-1", "r")), BUSY),
])  # fmt: skip
async def test_collectors_look_before_a_round(
    collector: str, result: CollectionResult, objection: str
) -> None:
    """A job that has started since they last did keeps rounds away, at once."""
    shot = idle_node()

    def collect(names: Iterable[str]) -> None:
        for name in names:
            shot.put(name, result if name == collector else shot[name].result)

    gpus = GpuOccupancy(shot, time.monotonic, collect)
    assert gpus.objection() == ""
    await gpus.refresh()
    assert gpus.objection() == objection


@pytest.mark.parametrize("name", ["gpu_processes", "job_environment"])
@pytest.mark.parametrize(("seconds", "known"), [(0.5, True), (1.5, False)])
async def test_a_look_takes_a_second_at_most(name: str, seconds: float, *, known: bool) -> None:
    """What collectors saw before says nothing of now: one that hangs leaves it unknown. Of a node
    with GPUs, they tell more than the ranks that are about to use them.
    """
    for shot, telling in ((idle_node(), {"gpu_processes"}), (idle_node(gpus=False), {name})):

        def collect(names: Iterable[str], shot: Snapshot = shot) -> None:
            for each in names:
                delay = seconds if each == name else 0.0
                asyncio.get_running_loop().call_later(delay, shot.put, each, shot[each].result)

        gpus = GpuOccupancy(shot, time.monotonic, collect)
        await gpus.refresh()
        assert gpus.objection() == ("" if known or name not in telling else UNKNOWN)


async def test_no_look_beside_a_training() -> None:
    """Where ranks are known to run, a round is out of the question, and nothing looks for more."""
    shot, asked = idle_node(), list[str]()
    shot.put("job_environment", found(RANKS(4, "run-1", "r")))
    gpus = GpuOccupancy(shot, time.monotonic, asked.extend)
    await gpus.refresh()
    assert (gpus.objection(), asked) == (BUSY, [])


def test_duty() -> None:
    """Scheduled rounds use at most their share of GPU time; on-demand ones are exempt."""
    clock = Time()
    ratio = PolicyOptions().duty_ratio
    limited = policy(snapshot(), clock)
    full = light = 0
    for _ in range(5000):
        if limited.objection(scheduled=True) == DUTY:
            assert limited.objection(scheduled=False) == ""
            light += 1
        else:
            limited.spend(0.03, scheduled=True)
            full += 1
        clock.now += 10.0
    assert full / (full + light) == pytest.approx(1 / 3, rel=0.05)
    limited.spend_in_vain(3600.0)
    limited.spend_in_vain(29.0)
    assert limited.used == pytest.approx(full * 0.03 + 30.0 + 29.0), "an agent may be stopped"
    assert full * 0.03 / (5000 * 10.0) <= ratio * (1 + SAVED / 50_000) + 0.03 / 50_000
