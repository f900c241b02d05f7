"""The number of GPUs that there ought to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.gpu_bus import EXPECTED
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench, value
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    from pathlib import Path


def test_gpus_and_their_loss(tmp_path: Path) -> None:
    """GPUs on the bus are counted, with no driver needed; none is 0 only after there was one."""
    simulator = Simulator(tmp_path / "simulator")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    bench = Bench("gpu_bus", tmp_path)
    assert bench.collect().outcome is CollectionOutcome.NOT_AVAILABLE
    for missing, count in ((range(0), 8), (range(1, 8), 1), (range(8), 0)):
        simulator.pci_sysfs(tmp_path / "sys", missing=missing)
        assert value(bench.collect(), EXPECTED) == count
