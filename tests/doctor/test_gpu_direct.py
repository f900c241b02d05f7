"""Paths between GPUs and adapters on fixture trees: each fault is found, and passes once mended."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.doctor.node import gpu_direct
from dshealthd.doctor.node.gpu_direct import ACS, CONFIG_SIZE, parse_acs
from dshealthd.doctor.node_context import NodeContext
from dshealthd.linux.pci import bus
from tests.doctor.looks import look, named, outcomes, results

GPU, ADAPTER, SWITCH = "0000:19:00.0", "0000:1a:00.0", "0000:18:01.0"
CPU = "flags\t\t: fpu sse2 ht\n"


def config(kind: int, acs: int | None) -> bytes:
    """Return the configuration space of a PCIe port of a type, with ACS control bits."""
    space = bytearray(CONFIG_SIZE)
    space[0x34] = 0x40
    space[0x40:0x44] = bytes([0x01, 0x60, 0, 0])  # power management, then PCI Express
    space[0x60:0x64] = bytes([0x10, 0, kind << 4 | 2, 0])
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)  # AER, then the next
    if acs is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x7F, acs)
    return bytes(space)


class Node:
    """A node with a GPU and an adapter below one PCIe switch, with the proprietary driver."""

    def __init__(self, directory: Path) -> None:
        """Write its files."""
        self.sys, self.proc = directory / "sys", directory / "proc"
        root = self.sys / "devices/pci0000:17"
        self.root_port = root / "0000:17:00.0"
        self.port = self.root_port / "0000:18:00.0" / SWITCH
        for place, kind in (
            (self.root_port, "0x060400"),
            (self.port.parent, "0x060400"),
            (self.port, "0x060400"),
        ):
            self.device(place, kind, "0x1000")
            (place / "config").write_bytes(config(4, 0x1D))
        (self.port / "config").write_bytes(config(6, 0x1D))
        self.gpu = self.device(self.port / GPU, "0x030200", "0x10de")
        adapter = self.device(self.port / ADAPTER, "0x020700", "0x15b3")
        infiniband = self.sys / "class/infiniband/mlx5_0"
        infiniband.mkdir(parents=True)
        (infiniband / "device").symlink_to(adapter)
        self.link = infiniband / "ports/1"
        self.link.mkdir(parents=True)
        for name, text in {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "InfiniBand",
        }.items():
            (self.link / name).write_text(f"{text}\n")
        for name, text in {
            "cpuinfo": CPU,
            "modules": "nvidia 100 1 - Live 0x0\n",
            "driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n",
            "sys/kernel/osrelease": "5.15.0-130-generic\n",
        }.items():
            self.write(name, text)

    def device(self, place: Path, kind: str, vendor: str) -> Path:
        """Add a device to the bus."""
        place.mkdir(parents=True)
        (place / "class").write_text(f"{kind}\n")
        (place / "vendor").write_text(f"{vendor}\n")
        bus = self.sys / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / place.name).symlink_to(place)
        return place

    def write(self, name: str, text: str) -> None:
        """Write a file below /proc."""
        file = self.proc / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def context(self) -> NodeContext:
        """What checks are given."""
        bus.cache_clear()
        host = Host(procfs=self.proc, sysfs=self.sys, rootfs=self.proc.parent)
        return look("software", "infiniband", host=host)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node with each fault."""
    return Node(tmp_path)


def test_acs(node: Node) -> None:
    """A switch port that redirects is found, no other is; what only root reads is unknown."""
    (found,) = results(ACS, node.context)
    assert (found.outcome.value, found.source) == ("warning", gpu_direct.NCCL_GUIDE)
    assert SWITCH in found.text
    assert found.remedy.startswith(f"sudo setpci -s {SWITCH} ECAP_ACS+0x6.w=0000")
    assert "0000:17:00.0" not in found.remedy
    for bit in (0x04, 0x08, 0x10):  # of requests, of their completions, upstream
        (node.port / "config").write_bytes(config(6, bit))
        assert outcomes(ACS, node.context) == ["warning"]
    for mended in (config(6, 0), config(6, 0x63), config(6, None)):
        (node.port / "config").write_bytes(mended)
        assert outcomes(ACS, node.context) == ["ok"]
    (node.port / "config").write_bytes(config(6, 0x1D)[:64])
    (unknown,) = results(ACS, node.context)
    assert (unknown.outcome.value, "sudo" in unknown.remedy) == ("unknown", True)
    node.write("cpuinfo", CPU.replace("ht", "ht hypervisor"))
    assert outcomes(ACS, node.context) == ["ok"]


@pytest.mark.parametrize("byte", [0x00, 0x40, 0xFF])
def test_configuration_space_without_sense(byte: int) -> None:
    """Capabilities that point at themselves or outside end; the port is none that redirects."""
    assert parse_acs(bytes([byte]) * CONFIG_SIZE) is None


def test_iommu(node: Node) -> None:
    """A translating IOMMU is found, on a machine of its own and a fabric that is up alone."""
    node.write("modules", "nvidia_peermem 16384 0 - Live 0x0\n")
    group = node.gpu / "iommu_group"
    group.mkdir()
    for kind, outcome in (("DMA-FQ", "warning"), ("DMA", "warning"), ("identity", "ok")):
        (group / "type").write_text(f"{kind}\n")
        (found,) = results(named("gpu-direct"), node.context)
        assert found.outcome.value == outcome
        assert outcome == "ok" or ("iommu=pt" in found.remedy and found.value == "1")
    (group / "type").write_text("DMA\n")
    node.write("cpuinfo", CPU.replace("ht", "ht hypervisor"))
    assert outcomes(named("gpu-direct"), node.context) == ["ok"]
    node.write("cpuinfo", CPU)
    (node.link / "state").write_text("1: DOWN\n")
    assert outcomes(named("gpu-direct"), node.context) == ["ok"]
    (node.link / "state").write_text("4: ACTIVE\n")
    (group / "type").unlink()
    assert outcomes(named("gpu-direct"), node.context) == ["ok"]


def test_peer_memory(node: Node) -> None:
    """Neither nvidia_peermem nor DMA-BUF is found; each of the two is enough."""
    (found,) = results(named("gpu-direct"), node.context)
    assert found.outcome.value == "warning"
    assert "sudo modprobe nvidia-peermem" in found.remedy
    node.write("modules", "nvidia_peermem 16384 0 - Live 0x0\nnvidia 100 1 - Live 0x0\n")
    assert outcomes(named("gpu-direct"), node.context) == ["ok"]
    node.write("modules", "nvidia_peermem_tools 1 0\n")
    assert outcomes(named("gpu-direct"), node.context) == ["warning"]
    node.write(
        "driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
    )
    for release, outcome in (("5.12.0", "ok"), ("5.11.22", "warning"), ("4.18.0-553", "warning")):
        node.write("sys/kernel/osrelease", f"{release}\n")
        assert outcomes(named("gpu-direct"), node.context) == [outcome]
    (node.proc / "driver/nvidia/version").unlink()
    assert outcomes(named("gpu-direct"), node.context) == ["ok"]


def test_nodes_without_adapters_are_not_judged(node: Node) -> None:
    """Without an RDMA adapter there is no path between GPU and adapter to judge."""
    shutil.rmtree(node.sys / "class/infiniband/mlx5_0")
    for check in (ACS, named("gpu-direct")):
        (found,) = results(check, node.context)
        assert found.outcome.value == "ok", check.name
        assert "no GPUs with RDMA adapters" in found.text, check.name
