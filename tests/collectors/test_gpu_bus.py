"""The number of GPUs that there ought to be."""

from __future__ import annotations

from pathlib import Path

from dshealthd.collectors.gpu_bus import AMD, EXPECTED, HIDDEN
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench, value, write
from tests.linux.test_pci import add
from tests.nvml.simulator import Simulator


def test_gpus_and_their_loss(tmp_path: Path) -> None:
    """GPUs on the bus are counted, with no driver needed; none is 0 only after there was one."""
    simulator = Simulator(tmp_path / "simulator")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    bench = Bench("gpu_bus", tmp_path)
    assert bench.collect().outcome is CollectionOutcome.NOT_AVAILABLE
    for missing, count in ((range(0), 8), (range(1, 8), 1), (range(8), 0)):
        simulator.pci_sysfs(tmp_path / "sys", missing=missing)
        assert value(bench.collect(), EXPECTED) == count


def test_amd_alone(tmp_path: Path) -> None:
    """GPUs of AMD are counted as unmonitored, and no number of NVIDIA's is claimed beside them."""
    add(tmp_path / "sys", "0000:05:00.0", "0x1002", "0x120000", "amdgpu")
    result = Bench("gpu_bus", tmp_path).collect()
    assert value(result, AMD) == 1
    assert {sample.metric for sample in result.samples} == {AMD}


def test_hidden(tmp_path: Path) -> None:
    """GPUs of the driver are hidden as far as there are fewer device files that may be opened."""
    for number, driver in enumerate(("nvidia", "nvidia", "nvidia", "nouveau", "")):
        add(tmp_path / "sys", f"0000:1{number}:00.0", "0x10de", "0x030200", driver)
    (tmp_path / "dev").mkdir()
    bench = Bench("gpu_bus", tmp_path)
    assert value(bench.collect(), EXPECTED) == 5
    for files, hidden in (
        ("nvidiactl nvidia-uvm", 3),
        ("nvidia0", 2),
        ("nvidia1 nvidia2", None),
        ("nvidia15", None),
    ):
        write(tmp_path / "dev", dict.fromkeys(files.split(), ""))
        assert value(bench.collect(), HIDDEN) == hidden
