"""PCIe links of GPUs: how many lanes there may be at most."""

from __future__ import annotations

import pytest

from tests.nvml.node import Node, nodes

node = nodes(gpus=2)


@pytest.mark.parametrize(("port", "most"), [("16", 16), ("32", 16), ("8", 8), ("255", 16)])
def test_slot_with_fewer_lanes_than_the_gpu(node: Node, port: str, most: int) -> None:
    """NVML's maximum is the GPU's own, whatever its slot has; the port above it knows the slot's,
    if not the kernel's 255, which is unknown.
    """
    assert node.collect("pcie").value("pcie_link_width_max", gpu="0") == 16
    place = node.sysfs / "bus/pci/devices" / node.simulator.value(0, "pci")[4:].lower()
    place.resolve().with_name("max_link_width").write_text(f"{port}\n")
    seen = node.collect("pcie", advance=61.0)
    assert seen.value("pcie_link_width_max", gpu="0") == most
    assert seen.value("pcie_link_width_max", gpu="1") == 16


@pytest.mark.parametrize(("mode", "known"), [(0, True), (1, False), (2, False), (3, True)])
def test_slot_that_a_virtual_machine_does_not_see(node: Node, mode: int, *, known: bool) -> None:
    """With a GPU passed through (1) or shared (2) the port above it is not the slot's, so the most
    lanes are unknown; a host of virtual machines (3) sees its slots.
    """
    node.simulator.set(None, "virtualization_mode", mode)
    seen = node.collect("pcie")
    assert len(seen.values("pcie_link_width")) == 2
    assert len(seen.values("pcie_link_width_max")) == 2 * known
