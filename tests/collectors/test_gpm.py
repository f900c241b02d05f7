"""GPM: averages between two sweeps, where the GPU has it; off unless it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors.gpm import GpmOptions
from dshealthd.core.collector import Reason
from tests.nvml.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Give two H100."""
    with Node(tmp_path, gpus=2) as made:
        yield made


def test_averages(node: Node) -> None:
    """The first sweep has one sample and nothing to say, each later one the averages since then."""
    assert node.collect("gpm").results["gpm"].samples == ()
    for _ in range(3):
        seen = node.collect("gpm", advance=61.0)  # the GPUs are listed anew each minute
        assert seen.value("gpu_sm_active_ratio", gpu="1", uuid=node.uuid(1)) == pytest.approx(0.63)
        assert seen.value("gpu_sm_occupancy_ratio", gpu="0") == pytest.approx(0.23)
        assert seen.value("gpu_tensor_active_ratio", gpu="0") == pytest.approx(0.41)
        assert seen.value("gpu_memory_bandwidth_ratio", gpu="0") == pytest.approx(0.33)
        assert not seen.reasons("gpm")


def test_one_that_is_not_known(node: Node) -> None:
    """A metric that the GPU does not tell, or has no number for, is absent; the others are there."""
    node.collect("gpm")
    node.simulator.set(0, "gpm_sm_occupancy", "unsupported")
    node.simulator.set(0, "gpm_dram_util", "na")
    seen = node.collect("gpm")
    assert {labels[0] for labels in seen.values("gpu_sm_occupancy_ratio")} == {"1"}
    assert {labels[0] for labels in seen.values("gpu_memory_bandwidth_ratio")} == {"1"}
    assert {labels[0] for labels in seen.values("gpu_sm_active_ratio")} == {"0", "1"}


def test_gpus_before_hopper(tmp_path: Path) -> None:
    """An A100 has no GPM: nothing is said, and no fault."""
    with Node(tmp_path, profile="a100", gpus=1) as node:
        for _ in range(2):
            seen = node.collect("gpm")
            assert seen.results["gpm"].samples == ()
            assert not seen.reasons("gpm")


@pytest.mark.parametrize("function", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_call_that_fails(node: Node, function: str) -> None:
    """A failing call is that GPU's fault; afterwards averages begin anew, and the other has its own."""
    node.collect("gpm")
    node.simulator.fault("fail", 999, gpu=0, function=function)
    seen = node.collect("gpm")
    assert seen.reasons("gpm") == {"gpu 0": Reason.UNKNOWN_ERROR}
    assert {labels[0] for labels in seen.values("gpu_sm_active_ratio")} == {"1"}
    node.simulator.clear_faults()
    node.collect("gpm")
    seen = node.collect("gpm")
    assert {labels[0] for labels in seen.values("gpu_sm_active_ratio")} == {"0", "1"}


def test_samples_are_kept(node: Node) -> None:
    """A GPU whose samples cannot be taken costs no memory: its two are used again."""
    node.simulator.watch()
    node.simulator.fault("fail", 999, gpu=0, function="nvmlGpmSampleGet")
    for _ in range(5):
        node.collect("gpm")
    assert node.simulator.calls()["nvmlGpmSampleAlloc"] == 2 * 2


def test_off_by_default() -> None:
    """Profilers use the same counters: nobody gets it without asking."""
    assert GpmOptions().enabled is False
