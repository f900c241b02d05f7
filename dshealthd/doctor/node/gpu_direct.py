"""What GPUDirect needs from the host: direct paths between GPUs and adapters, and their drivers.

Whether PCIe switches redirect is read here: it takes CAP_SYS_ADMIN, which the agent does not have.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.host import Host, read, read_bytes
from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Result, ok, unknown, warning
from dshealthd.linux import gpu_direct
from dshealthd.linux.infiniband import adapters

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext

CONFIG_SIZE = 4096
"""Bytes of a device's PCI Express configuration space; without CAP_SYS_ADMIN, 64 can be read."""
NCCL_GUIDE = (
    "docs.nvidia.com/deeplearning/nccl/user-guide, Troubleshooting, PCI Access Control Services"
)
_BRIDGE_CLASS = "0x0604"
_DOWNSTREAM_PORT = 6
"""Port type of a switch's side towards its devices (pci_regs.h, PCI_EXP_TYPE_DOWNSTREAM)."""
_FIRST, _EXTENDED = 0x40, 0x100
"""Where a device's capabilities, and its extended ones, begin."""
_PCIE, _ACS = 0x10, 0x0D
"""Identifiers of the capabilities PCI Express and Access Control Services."""
_CAPABILITY = struct.Struct("<4H")
"""The beginning of an extended capability, and the control bits of ACS after it."""
_REDIRECTS = 0x04 | 0x08 | 0x10
"""Control bits that send peer-to-peer traffic up to the root complex: requests, completions,
upstream forwarding (pci_regs.h, PCI_ACS_RR, PCI_ACS_CR, PCI_ACS_UF)."""


def parse_acs(config: bytes) -> int | None:
    """Return the ACS control bits of a switch's downstream port; None for any other device.

    `config` is its configuration space, complete.
    """
    at, kind = config[0x34], None
    for _ in range(CONFIG_SIZE):  # whose capabilities may lead around in a circle
        if at < _FIRST:
            break
        if config[at] == _PCIE:
            kind = config[at + 2] >> 4
        at = config[at + 1]
    if kind != _DOWNSTREAM_PORT:
        return None
    offset = _EXTENDED
    for _ in range(CONFIG_SIZE):
        if not _EXTENDED <= offset <= CONFIG_SIZE - _CAPABILITY.size:
            break
        capability, following, _, control = _CAPABILITY.unpack_from(config, offset)
        if capability == _ACS:
            return int(control)
        offset = following >> 4  # after the version
    return None


def _bridges(host: Host) -> list[str]:
    devices = [host.sys(f"bus/pci/devices/{address}") for address in gpu_direct.gpus(host)]
    devices += [host.sys(f"class/infiniband/{name}/device") for name in adapters(host)]
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
    if why := gpu_direct.paths_not_judged(host):
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
            f"({', '.join(redirecting[:4])}): traffic between devices goes through the root "
            "complex, which is slow and may hang",
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


ACS: Check[NodeContext] = Check(
    "slow-communication", "pcie-acs", "PCIe switches let GPUs and adapters reach each other", _acs
)
