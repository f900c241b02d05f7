"""GPUs on the PCI bus, and when the collectors of GPUs have nothing to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.config import registry
from dshealthd.core.host import Host
from dshealthd.linux.pci import RELEASE, Bus, driver_absent, gpus_absent
from dshealthd.nvml.collector import GpuCollectorOptions
from tests.collectors.bench import write


def add(root: Path, address: str, vendor: str, kind: str, driver: str = "") -> None:
    """Put a device on the bus of a tree like /sys."""
    device = root / "bus/pci/devices" / address
    write(device, {"vendor": vendor, "class": kind})
    if driver:
        (device / "driver").symlink_to(f"../../drivers/{driver}")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Give a machine with an NVSwitch, an audio function and a VGA card, without GPU."""
    root = tmp_path / "sys"
    add(root, "0000:05:00.0", "0x10de", "0x068000")
    add(root, "0000:18:00.1", "0x10de", "0x040300")
    add(root, "0000:03:00.0", "0x1a03", "0x030000")
    return Host(sysfs=root, dev=tmp_path / "dev", rootfs=tmp_path)


def test_gpus(host: Host) -> None:
    """Only NVIDIA's display controllers count, whether VGA or 3D."""
    bus = Bus(host)
    assert bus.gpus() == ()
    add(host.sysfs, "0000:9a:00.0", "0x10de", "0x030200", "nvidia")
    add(host.sysfs, "0000:18:00.0", "0x10de", "0x030000")
    add(host.sysfs, "0000:2a:00.0", "0x10de", "0x030200", "vfio-pci")
    assert bus.gpus() == ("0000:18:00.0", "0000:9a:00.0")


def test_virtual_functions(host: Host) -> None:
    """Of a GPU that is divided among virtual machines, NVML lists the GPU alone."""
    add(host.sysfs, "0000:41:00.0", "0x10de", "0x030200", "nvidia")
    for function in ("0000:41:00.4", "0000:41:00.5"):
        add(host.sysfs, function, "0x10de", "0x030200", "nvidia")
        (host.sysfs / "bus/pci/devices" / function / "physfn").symlink_to("../0000:41:00.0")
    assert Bus(host).gpus() == ("0000:41:00.0",)


def test_amd_gpus(host: Host) -> None:
    """AMD's GPUs that compute count while this system's driver has them; a console's does not."""
    add(host.sysfs, "0000:05:00.1", "0x1002", "0x120000", "amdgpu")
    add(host.sysfs, "0000:26:00.0", "0x1002", "0x038000", "amdgpu")
    add(host.sysfs, "0000:46:00.0", "0x1002", "0x120000", "vfio-pci")
    add(host.sysfs, "0000:65:00.0", "0x1002", "0x120000")
    add(host.sysfs, "0000:c3:00.0", "0x1002", "0x030000", "amdgpu")
    bus = Bus(host)
    assert bus.amd_gpus() == ("0000:05:00.1", "0000:26:00.0")
    assert bus.gpus() == ()


def test_gpu_removed_from_the_bus(host: Host) -> None:
    """A GPU that was removed no longer counts."""
    bus = Bus(host)
    add(host.sysfs, "0000:18:00.0", "0x10de", "0x030200")
    assert len(bus.gpus()) == 1
    (host.sysfs / "bus/pci/devices/0000:18:00.0").rename(host.sysfs / "gone")
    assert bus.gpus() == ()


def test_no_bus(tmp_path: Path) -> None:
    """A machine without PCI has no GPU, and that is no error for the agent."""
    host = Host(sysfs=tmp_path, dev=tmp_path, rootfs=tmp_path)
    with pytest.raises(FileNotFoundError):
        Bus(host).gpus()
    assert gpus_absent(host) is not None


def test_absent_without_gpu(host: Host) -> None:
    """Without GPU and driver there is nothing to do, and no worker is needed."""
    assert gpus_absent(host) == f"no NVIDIA GPU on the PCI bus and no {host.dev}/nvidiactl"


@pytest.mark.parametrize("name", ["nvidiactl", "dxg"])
def test_present_with_a_driver(host: Host, name: str) -> None:
    """A driver's device file is enough, also without a GPU on the bus: so it is under WSL."""
    host.dev.mkdir()
    (host.dev / name).touch()
    assert gpus_absent(host) is None


@pytest.mark.parametrize("place", ["dev/nvidiactl", "dev/dxg", "sys/module/nvidia"])
def test_driver(tmp_path: Path, place: str) -> None:
    """A device file or the module is a driver, with which jobs may use NCCL."""
    host = Host(sysfs=tmp_path / "sys", dev=tmp_path / "dev")
    assert driver_absent(host) == "no NVIDIA driver, and so no NCCL"
    (tmp_path / place).mkdir(parents=True)
    assert driver_absent(host) is None


def test_present_with_a_gpu_and_no_driver(host: Host) -> None:
    """A GPU on the bus without a driver is not absence: it is an error to report."""
    add(host.sysfs, "0000:18:00.0", "0x10de", "0x030200")
    assert gpus_absent(host) is None


def test_released(host: Host, tmp_path: Path) -> None:
    """While the release file exists every collector of GPUs is off and says why."""
    add(host.sysfs, "0000:18:00.0", "0x10de", "0x030200")
    (tmp_path / "run/dshealthd").mkdir(parents=True)
    (tmp_path / "run/dshealthd/release-gpus").touch()
    kinds = [kind for kind in registry.all_collectors().values() if kind.worker == "device"]
    names = {"gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "gpu_processes", "mig"}
    assert {kind.name for kind in kinds} == names
    assert {kind.absent(kind.Options(), host) for kind in kinds} == {f"released by {RELEASE}"}
    assert all(issubclass(kind.Options, GpuCollectorOptions) for kind in kinds)


def test_declarations_need_no_pynvml() -> None:
    """The agent reads the declarations and asks for absence without loading pynvml."""
    script = (
        "import sys\nfrom dshealthd.config import registry\nfrom dshealthd.core.host import Host\n"
        "for kind in registry.all_collectors().values(): kind.absent(kind.Options(), Host())\n"
        "print(*sys.modules)"
    )
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert "dshealthd.collectors.gpu" in modules
    assert "pynvml" not in modules
    assert "dshealthd.nvml.session" not in modules
