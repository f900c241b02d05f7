"""The number of GPUs that there ought to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.gpu_bus import EXPECTED, GpuBus
from dshealthd.core.collector import CollectorOptions, Context, Sample
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    from pathlib import Path


def collect(collector: GpuBus) -> Result:
    """Collect once."""
    return attempt(collector)


def collector(root: Path) -> GpuBus:
    """Return a collector on a tree like /sys."""
    return GpuBus(CollectorOptions(), Context(host=Host(sysfs=root)))


def test_gpus_and_their_loss(tmp_path: Path) -> None:
    """GPUs on the bus are counted, with no driver needed."""
    simulator = Simulator(tmp_path / "simulator")
    simulator.pci_sysfs(tmp_path / "sys")
    bus = collector(tmp_path / "sys")
    assert collect(bus).samples == (Sample(EXPECTED, (), 8),)
    simulator.pci_sysfs(tmp_path / "sys", missing=range(1, 8))
    assert collect(bus).samples == (Sample(EXPECTED, (), 1),)
    simulator.pci_sysfs(tmp_path / "sys", missing=range(8))
    assert collect(bus).samples == (Sample(EXPECTED, (), 0),)


def test_ordinary_machines(tmp_path: Path) -> None:
    """A machine without GPUs, or without PCI, is an ordinary one."""
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    assert collect(collector(tmp_path)).outcome is CollectionOutcome.NOT_AVAILABLE
    assert collect(collector(tmp_path / "nothing")).outcome is CollectionOutcome.NOT_AVAILABLE
