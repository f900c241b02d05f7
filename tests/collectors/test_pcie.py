"""PCIe links of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.nvml.node import Node

if TYPE_CHECKING:
    from pathlib import Path


def test_degraded_link(tmp_path: Path) -> None:
    """A link that lost lanes or speed shows it against its own maximum."""
    with Node(tmp_path, gpus=2) as node:
        node.simulator.set(1, "pcie_width", 8)
        node.simulator.set(1, "pcie_generation", 1)
        node.simulator.set(1, "pcie_replay", 300)
        node.simulator.set(1, "pcie_tx_bytes", 4096)
        seen = node.collect("pcie")
    values = {
        name: seen.value(f"pcie_{name}", gpu="1")
        for name in ("link_width", "link_width_max", "link_generation", "link_generation_max")
    }
    assert values == {
        "link_width": 8,
        "link_width_max": 16,
        "link_generation": 1,
        "link_generation_max": 5,
    }
    assert seen.value("pcie_replays_total", gpu="1") == 300
    assert seen.value("pcie_transmit_bytes_total", gpu="1") == 4096
    assert not seen.values("pcie_throughput_bytes_per_second")


def test_older_drivers(tmp_path: Path) -> None:
    """Where bytes are not counted they are measured, and replays come from the function that is
    older than the field.
    """
    with Node(tmp_path, profile="v100", gpus=1) as node:
        node.simulator.set(0, "field_fail.94", 3)
        node.simulator.set(0, "pcie_replay", 5)
        seen = node.collect("pcie")
    assert seen.value("pcie_replays_total") == 5
    assert seen.value("pcie_throughput_bytes_per_second", direction="transmit") == 100000 * 1024
    assert seen.value("pcie_throughput_bytes_per_second", direction="receive") == 200000 * 1024
    assert not seen.values("pcie_receive_bytes_total")


def test_errors(tmp_path: Path) -> None:
    """Each kind of error is its own NVML field; what a part does not count is absent, not 0."""
    with Node(tmp_path, gpus=1) as node:
        for field, value in {173: 11, 179: 12}.items():
            node.simulator.set(0, f"field.{field}", value)
        node.simulator.set(None, "field_fail.180", 3)
        seen = node.collect("pcie")
    assert seen.values("pcie_errors_total", gpu="0", uuid=node.uuid(0)) == {
        ("correctable",): 11,
        ("nonfatal",): 12,
    }
