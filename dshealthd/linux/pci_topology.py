"""PCI topology of a node: how GPUs and fabric adapters are connected, like `nvidia-smi topo -m`.

Bus addresses and names are left out, as they differ between otherwise identical nodes.
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
"""Mellanox, now NVIDIA: vendor of fabric adapters."""
_VIRTUAL = "physfn"
"""Link that only virtual functions have; their number is configurable."""


class Device(NamedTuple):
    """A GPU or an adapter."""

    kind: str
    """`gpu` or `adapter`, with the device ID."""
    numa_node: str
    bridges: tuple[str, ...]
    """The bridges above it, from the root complex down."""


def describe(host: Host) -> str | None:
    """Return the topology, one line per device: its kind, its NUMA node, and its distance to each
    other device.

    Nodes with equal lines have the same topology. None without GPUs. OSError.
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
    """Return the distance between two devices, in the terms of `nvidia-smi topo -m`.

    PIX: one switch; PXB: several; PHB: a host bridge; NODE: two host bridges of a NUMA node; SYS:
    the link between NUMA nodes.
    """
    common = _common(one.bridges, other.bridges)
    if common > 1:  # below one root port; a switch has an upstream bridge and one per device
        apart = max(len(one.bridges), len(other.bridges)) - common
        return "PIX" if apart <= 1 else "PXB"
    if common == 1:
        return "PHB"
    return "NODE" if one.numa_node == other.numa_node else "SYS"


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many PCI bridges two devices share, from the root complex down."""
    common = 0
    for above, beside in zip(one, other, strict=False):
        if above != beside:
            break
        common += 1
    return common


def _device(place: str) -> Device | None:
    """Return a GPU or adapter of the topology; None for other or just removed devices."""
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
    """Return a PCI device's NUMA node; -1, as in the kernel, if the firmware does not say."""
    try:
        return read(f"{place}/numa_node").strip()
    except FileNotFoundError:  # a kernel without NUMA
        return "-1"
