"""What GPUDirect RDMA needs from the host, with each condition on either side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from dshealthd.core.host import Host
from dshealthd.linux import gpu_direct
from tests.collectors.bench import write

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15"
VERSION, RELEASE = "driver/nvidia/version", "sys/kernel/osrelease"
GPUS = ("0000:19:00.0", "0000:1a:00.0")


def machine(
    directory: Path,
    files: Mapping[str, str] = MappingProxyType({}),
    adapter: str = "mlx5_0",
    gpus: int = 2,
) -> Host:
    """Return a machine with two GPUs and an adapter, but for these files of `/proc`."""
    for address in GPUS[:gpus]:
        identity = {"class": "0x030200", "vendor": "0x10de"}
        write(directory / "sys/bus/pci/devices" / address, identity)
    if adapter:
        vendor = "0x14e4" if adapter.startswith("bnxt") else "0x15b3"
        write(directory / "sys/class/infiniband" / adapter, {"device/vendor": vendor})
    usual = {
        "cpuinfo": "processor: 0\nflags\t\t: fpu sse2 ht",
        "modules": "nvidia 100 1 - Live 0x0",
        VERSION: OPEN,
        RELEASE: "5.15.0-130-generic",
    }
    write(directory / "proc", {name: text for name, text in (usual | {**files}).items() if text})
    return Host(procfs=directory / "proc", sysfs=directory / "sys")


@pytest.mark.parametrize(
    ("adapter", "gpus", "cpuinfo", "why"),
    [
        ("mlx5_0", 2, "flags\t\t: fpu ht\n", ""),
        ("mlx5_0", 2, "flags\t\t: fpu hypervisor ht\n", "a virtual machine"),
        ("mlx5_0", 2, "Features\t: fp asimd\n", "not an x86 machine"),
        ("mlx5_0", 0, "flags\t\t: fpu\n", "no GPUs"),
        ("", 2, "flags\t\t: fpu\n", "no GPUs"),
    ],
)
def test_what_is_judged(tmp_path: Path, adapter: str, gpus: int, cpuinfo: str, why: str) -> None:
    """Machines of their own, with GPUs and adapters."""
    host = machine(tmp_path, {"cpuinfo": cpuinfo}, adapter, gpus)
    found = gpu_direct.paths_not_judged(host)
    assert bool(found) is bool(why)
    assert found.startswith(why)
    assert (gpu_direct.gpus_translated(host) is None) is bool(why)


@pytest.mark.parametrize(
    ("files", "reaches"),
    [
        ({}, True),
        ({RELEASE: "5.11.22-7"}, False),
        ({RELEASE: "5.12.0"}, True),
        ({RELEASE: "6.1.0"}, True),
        ({VERSION: CLOSED}, False),
        ({VERSION: CLOSED, "modules": "nvidia_peermem 1 0 - Live 0x0"}, True),
        ({VERSION: CLOSED, "modules": "nv_peer_mem 1 0 - Live 0x0"}, True),
        ({VERSION: CLOSED, "modules": "nvidia_peermem_x 1 0 - Live 0x0"}, False),
        ({VERSION: ""}, None),
    ],
)
def test_peer_memory(tmp_path: Path, files: dict[str, str], *, reaches: bool | None) -> None:
    """By a module, or as a DMA-BUF of the open driver from Linux 5.12 on."""
    assert gpu_direct.peer_memory(machine(tmp_path, files)) is reaches


def test_adapters_that_udev_has_renamed(tmp_path: Path) -> None:
    """NVIDIA's adapters are known by their vendor: rdma-core renames them by default."""
    for adapter in ("ibp24s0", "rocep65s0f0"):
        host = machine(tmp_path / adapter, {VERSION: CLOSED}, adapter)
        assert gpu_direct.peer_memory(host) is False


@pytest.mark.parametrize(("adapter", "gpus"), [("bnxt_re0", 2), ("", 2), ("mlx5_0", 0)])
def test_whose_peer_memory_is_not_known(tmp_path: Path, adapter: str, gpus: int) -> None:
    """Adapters of others have drivers of their own."""
    assert gpu_direct.peer_memory(machine(tmp_path, {}, adapter, gpus)) is None


@pytest.mark.parametrize(
    ("types", "count"),
    [(("DMA", "DMA-FQ"), 2), (("identity", "DMA"), 1), (("identity", ""), 0), (("", ""), 0)],
)
def test_addresses_that_an_iommu_translates(
    tmp_path: Path, types: tuple[str, ...], count: int
) -> None:
    """Not those that it passes on, nor without one."""
    host = machine(tmp_path)
    for address, kind in zip(GPUS, types, strict=True):
        if kind:
            write(tmp_path / "sys/bus/pci/devices" / address, {"iommu_group/type": kind})
    assert gpu_direct.gpus_translated(host) == count
