"""One figure per node, of what it has by GPU."""

from __future__ import annotations

import pytest

from dshealthd.agent.node_figures import samples
from dshealthd.core.collector import Sample, gauge
from dshealthd.core.result import CollectionOutcome, CollectionResult
from tests.snapshots import snapshot

INFO = gauge("dshealthd_gpu_info", "Info.", "gpu", "uuid", "pci", "name")
UP = gauge("dshealthd_gpu_up", "Up.", "gpu", "uuid")
USED = gauge("dshealthd_gpu_utilization_ratio", "Used.", "gpu", "uuid")
POWER = gauge("dshealthd_gpu_power_watts", "Power.", "gpu", "uuid")
HEAT = gauge("dshealthd_gpu_temperature_celsius", "Heat.", "gpu", "uuid", "sensor")
CLOCK = gauge("dshealthd_gpu_clock_hertz", "Clock.", "gpu", "uuid", "domain")
LIMIT = gauge("dshealthd_gpu_power_limit_watts", "Limit.", "gpu", "uuid", "limit")
HELD = gauge("dshealthd_gpu_throttle_active", "Held.", "gpu", "uuid", "reason")


Figures = dict[str, float]


def gpu(
    number: int,
    *,
    clock: float = 1.9e9,
    used: float = 1.0,
    model: str = "H100",
    enforced: float = 700.0,
    held: float = 0.0,
) -> list[Sample]:
    """Return the samples of one GPU."""
    at = str(number), f"GPU-{number}"
    return [
        INFO(1.0, *at, f"0000:{number}:00.0", model),
        UP(1.0, *at),
        USED(used, *at),
        POWER(100.0 * number, *at),
        HEAT(50.0 + number, *at, "core"),
        HEAT(90.0, *at, "memory"),
        CLOCK(clock, *at, "sm"),
        CLOCK(1e8, *at, "memory"),
        LIMIT(700.0, *at, "default"),
        LIMIT(enforced, *at, "enforced"),
        HELD(held, *at, "sw_power_cap"),
    ]


def figures(*found: Sample, outcome: CollectionOutcome | None = CollectionOutcome.OK) -> Figures:
    """Return the figures by what their names have after `node_`, and the class as a name of its
    own; those before the first sample without an outcome.
    """
    made = snapshot({"gpu": None if outcome is None else CollectionResult(outcome, found)})
    return {
        sample.labels[0] if sample.labels else sample.metric.name.removeprefix("dshealthd_node_"): (
            sample.value
        )
        for sample in samples(made, 0.5)
    }


def test_figures_of_a_busy_node() -> None:
    """Counts and sums over all GPUs, the hottest core, the lowest clock of those that compute."""
    found = figures(*gpu(1), *gpu(2, clock=1.8e9), *gpu(3, clock=2e8, used=0.0))
    assert found == {
        "H100": 1.0,
        "gpus_up": 3.0,
        "gpu_utilization_ratio": pytest.approx(2 / 3),
        "gpu_power_watts": 600.0,
        "gpu_temperature_celsius": 53.0,
        "gpu_clock_hertz": 1.8e9,
    }


def test_a_node_without_gpus_has_its_class_alone() -> None:
    """What is not known has no series: it is never 0."""
    assert figures(outcome=CollectionOutcome.NOT_AVAILABLE) == {"none": 1.0}


def test_a_node_whose_gpus_are_not_known_has_no_class() -> None:
    """It would be compared with nodes without GPUs: before the first sample, while the driver does
    not answer, or says nothing of a GPU.
    """
    assert figures(outcome=None) == {}
    assert figures(outcome=CollectionOutcome.ERROR) == {}
    assert figures(UP(0.0, "0", "GPU-0")) == {"gpus_up": 0.0}


def test_the_class_is_the_model_of_most_gpus() -> None:
    """Of equally many, the first by name, so that it does not flap."""
    assert "H100" in figures(*gpu(1), *gpu(2), *gpu(3, model="A100"))
    assert "A100" in figures(*gpu(1), *gpu(3, model="A100"))


def test_a_gpu_at_its_default_power_limit_is_not_slow() -> None:
    """Running at the power limit is usual under full load, unless somebody has lowered the
    limit.
    """
    held = gpu(1, clock=1.2e9, held=1.0)
    assert figures(*gpu(1, clock=1.2e9), *gpu(2))["gpu_clock_hertz"] == 1.2e9
    assert figures(*held, *gpu(2))["gpu_clock_hertz"] == 1.9e9
    lowered = gpu(1, clock=1.2e9, held=1.0, enforced=500.0)
    assert figures(*lowered, *gpu(2))["gpu_clock_hertz"] == 1.2e9
    assert "gpu_clock_hertz" not in figures(*held)
