"""What GPUDirect needs from the host: direct paths between GPUs and adapters, and their drivers.

Only nodes with NVIDIA GPUs and RDMA adapters are judged. All of it is read from files of the kernel.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from dshealthd.core.host import read, read_bytes
from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Result, critical, ok, unknown, warning
from dshealthd.linux.imex import daemon
from dshealthd.linux.pci import NVIDIA, bus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.core.host import Host
    from dshealthd.doctor.node_context import NodeContext

CONFIG_SIZE = 4096
"""Bytes of a device's PCI Express configuration space; without CAP_SYS_ADMIN, 64 can be read."""
NCCL_GUIDE = (
    "docs.nvidia.com/deeplearning/nccl/user-guide, Troubleshooting, PCI Access Control Services"
)
RDMA_GUIDE = "docs.nvidia.com/cuda/gpudirect-rdma, Supported Systems"
OPERATOR_GUIDE = "docs.nvidia.com/datacenter/cloud-native/gpu-operator, GPUDirect RDMA"
FABRIC_GUIDE = "docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide"
PEER_MEMORY = frozenset({"nvidia_peermem", "nv_peer_mem"})
FIRST_KERNEL = (5, 12)
"""The first kernel in which an adapter can read a GPU's memory as a DMA-BUF."""
FABRIC_MANAGER = "nv-fabricmanager"
SUBNET_MANAGER = "nvlsm"
"""The subnet manager of NVLink, which Fabric Manager's service starts on Blackwell's boards."""
_SWITCH_CLASS = "0x0680"
"""NVSwitches are bridges of another kind; those of Blackwell's boards are not on the PCI bus."""
_SWITCH_MANAGEMENT = b"SW_MNG"
"""In the vital product data of an adapter through which a Blackwell board's switches are managed."""
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
_INITIAL_NAMESPACE = "pid:[4026531836]"
"""The kernel's first PID namespace (proc_ns.h, PROC_PID_INIT_INO)."""


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


def _is_switch(device: str) -> bool:
    """Return whether a device is an NVSwitch of a board before Blackwell's."""
    is_bridge = read(f"{device}/class").startswith(_SWITCH_CLASS)
    return is_bridge and read(f"{device}/vendor").strip() == NVIDIA


def _manages_switches(adapter: str) -> bool:
    """Return whether NVSwitches of a Blackwell board are managed through an adapter. OSError."""
    try:
        return _SWITCH_MANAGEMENT in read_bytes(f"{adapter}/vpd", CONFIG_SIZE)
    except FileNotFoundError:  # a virtual function has none
        return False


def _managed_switches(host: Host) -> tuple[str, tuple[str, ...]]:
    """Return the NVSwitches that this node manages, and the daemons for it; empty if none. OSError."""
    base = host.sys("bus/pci/devices")
    devices = os.listdir(base) if os.path.isdir(base) else ()
    if count := sum(_is_switch(f"{base}/{address}") for address in devices):
        return plural(count, "NVSwitch", "NVSwitches"), (FABRIC_MANAGER,)
    adapters = [
        name
        for name in _adapters(host)
        if name.startswith("mlx5_")
        and _manages_switches(host.sys(f"class/infiniband/{name}/device"))
    ]
    if not adapters:
        return "", ()
    return f"NVSwitches behind {', '.join(adapters)}", (SUBNET_MANAGER, FABRIC_MANAGER)


def _not_running(host: Host, daemons: Iterable[str]) -> list[str] | None:
    """Return which of the daemons do not run; None if that cannot be seen from here."""
    namespace = host.proc("self/ns/pid")
    if os.path.lexists(namespace) and os.readlink(namespace) != _INITIAL_NAMESPACE:
        return None
    try:
        return [name for name in daemons if daemon(host, name=name) is None]
    except OSError:
        return None


def _fabric_manager(context: NodeContext) -> Iterator[Result]:
    host, component = context.host, "Fabric Manager"
    switches = ""
    daemons: tuple[str, ...] = ()
    try:
        switches, daemons = _managed_switches(host)
    except OSError as error:
        is_known = any(context.series("gpu_info"))
        if any(context.series("gpu_fabric_state")) if is_known else _gpus(host):
            yield unknown(
                "whether NVSwitches are managed through this node's adapters cannot be read: "
                f"{error.strerror}",
                remedy="sudo dshealthd doctor --only fabric-manager",
                component=component,
            )
            return
    if not switches:
        yield ok("not applicable: no NVSwitch is managed by this node")
    elif SUBNET_MANAGER in daemons and not os.path.isdir(host.sys("class/infiniband_mad")):
        yield critical(
            f"ib_umad is not loaded, but the node has {switches}, which are managed through it: "
            "Fabric Manager cannot start, and new CUDA programs fail with cudaErrorSystemNotReady",
            remedy="sudo modprobe ib_umad; sudo systemctl restart nvidia-fabricmanager"
            "  # while no job runs",
            value="not loaded",
            limit="loaded",
            source=FABRIC_GUIDE,
            component=component,
        )
    elif (missing := _not_running(host, daemons)) is None:
        yield unknown(
            f"the node has {switches}, but whether Fabric Manager runs cannot be seen from here (a"
            " container, or /proc hides processes)",
            remedy="systemctl status nvidia-fabricmanager  # on the node itself",
            component=component,
        )
    elif missing:
        yield critical(
            f"Fabric Manager is not at work ({', '.join(missing)}), but the node has {switches}: new"
            " CUDA programs fail with cudaErrorSystemNotReady or lose NVLink. NVML still shows the"
            " state from when it ran",
            remedy="journalctl -u nvidia-fabricmanager -n 50; sudo systemctl restart"
            " nvidia-fabricmanager  # while no job runs",
            value="not running",
            limit="running",
            source=FABRIC_GUIDE,
            component=component,
        )
    else:
        yield ok(f"Fabric Manager runs for {switches}")


ACS: Check[NodeContext] = Check(
    "slow-communication", "pcie-acs", "PCIe switches let GPUs and adapters reach each other", _acs
)
IOMMU: Check[NodeContext] = Check(
    "slow-communication", "iommu", "The IOMMU does not translate GPUs' addresses", _iommu
)
PEER: Check[NodeContext] = Check(
    "slow-communication", "peer-memory", "Adapters can reach GPU memory", _peer_memory
)
FABRIC: Check[NodeContext] = Check(
    "bad-link", "fabric-manager", "Fabric Manager runs on nodes with NVSwitches", _fabric_manager
)
