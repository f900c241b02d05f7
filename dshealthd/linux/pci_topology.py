"""The PCI topology of a node: how GPUs and fabric adapters are joined, like `nvidia-smi topo -m`.

Addresses on the bus and names are left out, as they differ between nodes that are otherwise alike.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.host import read
from dshealthd.linux.pci import DISPLAY_CLASSES, NVIDIA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.core.host import Host

_NETWORK_CLASSES = ("0x0200", "0x0207")
"""Ethernet and InfiniBand controllers."""
_ADAPTERS = "0x15b3"
"""Mellanox, now NVIDIA: vendor of the adapters that fabrics are made of."""
_VIRTUAL = "physfn"
"""Link of a virtual function: as many as somebody asked for."""


class Device(NamedTuple):
    """A GPU or an adapter."""

    kind: str
    """`gpu` or `adapter`, with the device id."""
    numa_node: str
    bridges: tuple[str, ...]
    """The bridges above it, from the root complex on."""


def describe(host: Host) -> str | None:
    """Return the topology, one line a device: what it is, its NUMA node, and what is between it and
    each other.

    Lines that are the same on two nodes mean that these are joined alike. None without GPUs. OSError.
    """
    base = host.sys("bus/pci/devices")
    try:
        addresses = sorted(os.listdir(base))
    except FileNotFoundError:  # no PCI bus
        return None
    found = [
        device for address in addresses if (device := _device(f"{base}/{address}")) is not None
    ]
    if not any(device.kind.startswith("gpu") for device in found):
        return None
    return "\n".join(
        " ".join(
            (
                one.kind,
                one.numa_node,
                *("X" if one is other else distance(one, other) for other in found),
            )
        )
        for one in found
    )


def distance(one: Device, other: Device) -> str:
    """Return what is between two devices, in the words of `nvidia-smi topo -m`.

    PIX: one switch; PXB: several; PHB: a host bridge; NODE: two host bridges of a NUMA node; SYS: the
    link between NUMA nodes.
    """
    common = _common(one.bridges, other.bridges)
    if common > 1:  # below one root port; a switch has a bridge above and one for each device
        apart = max(len(one.bridges), len(other.bridges)) - common
        return "PIX" if apart <= 1 else "PXB"
    if common == 1:
        return "PHB"
    return "NODE" if one.numa_node == other.numa_node else "SYS"


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many PCI bridges two devices share, from the root complex on."""
    common = 0
    for above, beside in zip(one, other, strict=False):
        if above != beside:
            break
        common += 1
    return common


def _device(place: str) -> Device | None:
    """Return a GPU or adapter of the topology; None for others, or what has just been removed."""
    try:
        kind = read(f"{place}/class")
        vendor = read(f"{place}/vendor").strip()
        if vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES):
            name = "gpu"
        elif vendor == _ADAPTERS and kind.startswith(_NETWORK_CLASSES):
            if os.path.lexists(f"{place}/{_VIRTUAL}"):
                return None
            name = "adapter"
        else:
            return None
        identity, numa = read(f"{place}/device").strip(), _numa_node(place)
    except FileNotFoundError:
        return None
    above = os.path.realpath(place).split("/")[:-1]
    roots = [at for at, part in enumerate(above) if part.startswith("pci")]
    bridges = tuple(above[roots[-1] :]) if roots else ()
    return Device(f"{name}:{identity}", numa, bridges)


def _numa_node(place: str) -> str:
    """Return a PCI device's NUMA node; -1 where the firmware does not say, as the kernel does."""
    try:
        return read(f"{place}/numa_node").strip()
    except FileNotFoundError:  # a kernel without NUMA
        return "-1"
