"""What GPUDirect needs from the host: direct paths between GPUs and adapters, and their drivers.

Only nodes with NVIDIA GPUs and RDMA adapters are judged. All of it is read from files of the kernel.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from dshealthd.core.host import read, read_bytes
from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Result, ok, unknown, warning
from dshealthd.linux.pci import bus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.host import Host
    from dshealthd.doctor.node_context import NodeContext

CONFIG_SIZE = 4096
"""Bytes of a device's PCI Express configuration space; without CAP_SYS_ADMIN, 64 can be read."""
NCCL_GUIDE = (
    "docs.nvidia.com/deeplearning/nccl/user-guide, Troubleshooting, PCI Access Control Services"
)
RDMA_GUIDE = "docs.nvidia.com/cuda/gpudirect-rdma, Supported Systems"
OPERATOR_GUIDE = "docs.nvidia.com/datacenter/cloud-native/gpu-operator, GPUDirect RDMA"
PEER_MEMORY = frozenset({"nvidia_peermem", "nv_peer_mem"})
FIRST_KERNEL = (5, 12)
"""The first kernel in which an adapter can read a GPU's memory as a DMA-BUF."""
_BRIDGE_CLASS = "0x0604"
_DOWNSTREAM_PORT = 6
"""Port type of a switch's side towards its devices (pci_regs.h, PCI_EXP_TYPE_DOWNSTREAM)."""
_FIRST, _EXTENDED = 0x40, 0x100
"""Where a device's capabilities, and its extended ones, begin."""
_PCIE, _ACS = 0x10, 0x0D
"""Identifiers of the capabilities PCI Express and Access Control Services."""
_REDIRECTS = 0x04 | 0x08 | 0x10
"""Control bits that send peer-to-peer traffic up to the root complex: requests, completions,
upstream forwarding (pci_regs.h, PCI_ACS_RR, PCI_ACS_CR, PCI_ACS_UF)."""


def parse_acs(config: bytes) -> int | None:
    """Return the ACS control bits of a switch's downstream port; None for any other device.

    `config` is its configuration space, complete.
    """
    at, kind = config[0x34], None
    for _ in range(48):  # as many capabilities as the first 256 bytes can hold
        if not _FIRST <= at < _EXTENDED - 4:
            break
        if config[at] == _PCIE:
            kind = config[at + 2] >> 4
        at = config[at + 1]
    if kind != _DOWNSTREAM_PORT:
        return None
    offset = _EXTENDED
    for _ in range((CONFIG_SIZE - _EXTENDED) // 8):
        if not _EXTENDED <= offset <= CONFIG_SIZE - 8:
            break
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", config, offset + 6)[0])
        offset = header >> 20
    return None


def _gpus(host: Host) -> tuple[str, ...]:
    try:
        return bus(host).gpus()
    except FileNotFoundError:  # no PCI bus
        return ()


def _adapters(host: Host) -> list[str]:
    try:
        return sorted(os.listdir(host.sys("class/infiniband")))
    except FileNotFoundError:
        return []


def _not_judged(host: Host) -> str:
    """Return why PCI switches and IOMMU of this machine are not judged; "" if they are."""
    if not _gpus(host) or not _adapters(host):
        return "no GPUs with RDMA adapters"
    flags = [line for line in read(host.proc("cpuinfo")).splitlines() if line.startswith("flags")]
    if not flags:
        return "not an x86 machine"
    return "a virtual machine, which needs ACS and ATS" if " hypervisor" in flags[0] else ""


def _bridges(host: Host) -> list[str]:
    devices = [host.sys(f"bus/pci/devices/{address}") for address in _gpus(host)]
    devices += [host.sys(f"class/infiniband/{name}/device") for name in _adapters(host)]
    found: set[str] = set()
    for device in devices:
        bridge = os.path.dirname(os.path.realpath(device))
        while os.path.exists(f"{bridge}/class") and read(f"{bridge}/class").startswith(
            _BRIDGE_CLASS
        ):
            found.add(bridge)
            bridge = os.path.dirname(bridge)
    return sorted(found)


def _acs(context: NodeContext) -> Iterator[Result]:
    host = context.host
    if why := _not_judged(host):
        yield ok(f"not applicable: {why}")
        return
    redirecting, unread = [], 0
    for bridge in _bridges(host):
        config = read_bytes(f"{bridge}/config", CONFIG_SIZE)
        if len(config) < CONFIG_SIZE:
            unread += 1
        elif (parse_acs(config) or 0) & _REDIRECTS:
            redirecting.append(os.path.basename(bridge))
    if redirecting:
        yield warning(
            f"ACS is on in {plural(len(redirecting), 'PCIe switch port')} above GPUs or adapters "
            f"({', '.join(redirecting[:4])}): traffic between devices goes through the root complex,"
            " which is slow and may hang",
            remedy="; ".join(
                f"sudo setpci -s {address} ECAP_ACS+0x6.w=0000" for address in redirecting
            )
            + "  # until the next boot; not where virtual machines use these devices",
            value="redirected",
            limit="direct",
            source=NCCL_GUIDE,
            component="ACS",
        )
    elif unread:
        yield unknown(
            f"only root can read ACS of {plural(unread, 'PCI bridge')} above GPUs and adapters",
            remedy="sudo dshealthd doctor --only pcie-acs",
            component="ACS",
        )
    else:
        yield ok("no PCIe switch redirects traffic between GPUs and adapters")


def _iommu(context: NodeContext) -> Iterator[Result]:
    host = context.host
    if why := _not_judged(host):
        yield ok(f"not applicable: {why}")
        return
    kinds: dict[str, list[str]] = {}
    for address in _gpus(host):
        try:
            kind = read(host.sys(f"bus/pci/devices/{address}/iommu_group/type")).strip()
        except FileNotFoundError:  # no IOMMU in use
            continue
        kinds.setdefault(kind, []).append(address)
    translated = [address for kind in kinds for address in kinds[kind] if kind.startswith("DMA")]
    if translated:
        yield warning(
            f"an IOMMU translates the addresses of {plural(len(translated), 'GPU')} "
            f"({', '.join(translated[:4])}): GPUDirect RDMA needs it off or in pass-through mode",
            remedy="cat /proc/cmdline  # add iommu=pt to the kernel's parameters and reboot",
            value=", ".join(kinds),
            limit="identity",
            source=RDMA_GUIDE,
            component="IOMMU",
        )
    else:
        yield ok(f"the IOMMU passes GPUs through ({', '.join(kinds) or 'no IOMMU in use'})")


def _peer_memory(context: NodeContext) -> Iterator[Result]:
    host = context.host
    if not _gpus(host) or not any(name.startswith("mlx5_") for name in _adapters(host)):
        yield ok("not applicable: no GPUs with RDMA adapters of NVIDIA")
        return
    try:
        version = read(host.proc("driver/nvidia/version"))
    except FileNotFoundError:
        yield ok("not applicable: no NVIDIA driver is loaded")
        return
    modules = {line.split(" ", 1)[0] for line in read(host.proc("modules")).splitlines()}
    if loaded := sorted(PEER_MEMORY & modules):
        yield ok(f"adapters reach GPU memory: {loaded[0]} is loaded")
        return
    release = read(host.proc("sys/kernel/osrelease")).strip()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    is_open = "Open Kernel Module" in version
    if is_open and numbers >= FIRST_KERNEL:
        yield ok(f"adapters reach GPU memory by DMA-BUF: open driver, kernel {release}")
        return
    yield warning(
        "nvidia_peermem is not loaded, and DMA-BUF needs the open kernel modules and Linux 5.12 or"
        f" newer (here: {'open' if is_open else 'proprietary'} modules, {release}): NCCL copies"
        " everything through the host's memory",
        remedy="sudo modprobe nvidia-peermem",
        value="not loaded",
        source=OPERATOR_GUIDE,
        component="nvidia_peermem",
    )


ACS: Check[NodeContext] = Check(
    "slow-communication", "pcie-acs", "PCIe switches let GPUs and adapters reach each other", _acs
)
IOMMU: Check[NodeContext] = Check(
    "slow-communication", "iommu", "The IOMMU does not translate GPUs' addresses", _iommu
)
PEER: Check[NodeContext] = Check(
    "slow-communication", "peer-memory", "Adapters can reach GPU memory", _peer_memory
)
