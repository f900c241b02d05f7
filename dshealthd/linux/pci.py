"""NVIDIA's and AMD's GPUs on the PCI bus, from sysfs, and a topology as of `nvidia-smi topo`."""

from __future__ import annotations

import functools
import itertools
import os
from typing import NamedTuple

from dshealthd.core.host import Host, read, read_existing

RELEASE = "/run/dshealthd/release-gpus"
"""While this file exists all GPU collectors are off, so that the driver can be unloaded."""
NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
"""VGA controllers and 3D controllers; data-center GPUs are the latter."""
AMD = "0x1002"
AMD_CLASSES = ("0x0302", "0x0380", "0x1200")
"""AMD's GPUs that compute (MI250: 0380, MI300: 1200); a VGA controller may be a console's."""
SWITCH_CLASS = "0x0680"
"""Bridges of another kind: NVSwitches. Those of Blackwell's boards are not on the PCI bus."""
PASSED_THROUGH = frozenset({"vfio-pci", "pci-stub"})
"""Drivers that hold a device for a virtual machine, so that this system cannot use it."""
_NETWORK_CLASSES = ("0x0200", "0x0207")
"""Ethernet and InfiniBand controllers."""
ADAPTERS = "0x15b3"
"""Mellanox, now NVIDIA: vendor of fabric adapters."""
VIRTUAL = "physfn"
"""Link that only virtual functions have, as their host sees them; their number is configurable."""


class Bus:
    """The PCI devices of a machine. Types never change: a scan costs one directory listing."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._kinds: dict[str, str] = {}
        """Vendor and class of NVIDIA's and AMD's devices by address; "" for others, and for virtual
        functions."""

    def models(self) -> set[str]:
        """Return the device IDs of NVIDIA's GPUs on the bus: several if models differ. OSError."""
        places = (self._host.sys(f"bus/pci/devices/{address}/device") for address in self.gpus())
        return {read(place).strip() for place in places}

    def gpus(self) -> tuple[str, ...]:
        """Return the addresses of NVIDIA's GPUs, in bus order. OSError if it cannot be read."""
        return self._of_nvidia(DISPLAY_CLASSES)

    def hidden(self) -> int:
        """Return how many GPUs of NVIDIA's driver this process may not open, as those of another
        container or job. No device is opened. OSError.
        """
        held = sum(self._driver(address) == "nvidia" for address in self.gpus())
        files = (
            self._host.device(name)
            for name in os.listdir(self._host.dev)
            if name.startswith("nvidia") and name.removeprefix("nvidia").isdecimal()
        )
        # The kernel asks the device cgroup, too.
        return max(0, held - sum(os.access(file, os.R_OK | os.W_OK) for file in files))

    def amd_gpus(self) -> tuple[str, ...]:
        """Return the addresses of AMD's GPUs that this system uses, in bus order. OSError."""
        found = self._devices(AMD, AMD_CLASSES)
        return tuple(address for address in found if self._driver(address) == "amdgpu")

    def ports(self) -> dict[str, str]:
        """Return NVIDIA's GPUs by the port of a bridge that their link begins at. OSError."""
        found: dict[str, str] = {}
        for gpu in self.gpus():
            place = os.path.realpath(self._host.sys(f"bus/pci/devices/{gpu}"))
            # Functions of one device come after its first.
            found.setdefault(os.path.basename(os.path.dirname(place)), gpu)
        return found

    def switches(self) -> tuple[str, ...]:
        """Return the addresses of NVSwitches, in bus order; empty without a PCI bus. OSError."""
        try:
            return self._of_nvidia((SWITCH_CLASS,))
        except FileNotFoundError:
            return ()

    def _of_nvidia(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        found = self._devices(NVIDIA, classes)
        return tuple(address for address in found if self._driver(address) not in PASSED_THROUGH)

    def _devices(self, vendor: str, classes: tuple[str, ...]) -> tuple[str, ...]:
        addresses = os.listdir(self._host.sys("bus/pci/devices"))
        self._kinds = {
            address: self._kinds[address] if address in self._kinds else self._kind(address)
            for address in addresses
        }
        wanted = tuple(f"{vendor} {one}" for one in classes)
        return tuple(
            sorted(address for address, kind in self._kinds.items() if kind.startswith(wanted))
        )

    def _kind(self, address: str) -> str:
        place = self._host.sys(f"bus/pci/devices/{address}")
        if os.path.lexists(f"{place}/{VIRTUAL}"):  # of a GPU that virtual machines share
            return ""
        try:
            vendor = read(f"{place}/vendor").strip()
            return f"{vendor} {read(f'{place}/class')}" if vendor in {NVIDIA, AMD} else ""
        except FileNotFoundError:  # removed since the listing
            return ""

    def _driver(self, address: str) -> str:
        """Return the name of a device's driver; empty if none is bound."""
        try:
            driver = os.readlink(self._host.sys(f"bus/pci/devices/{address}/driver"))
        except OSError:
            return ""
        return os.path.basename(driver)


@functools.cache
def bus(host: Host) -> Bus:
    """Return this process's one PCI `Bus` for a host."""
    return Bus(host)


def slot_lanes(host: Host, address: str) -> int | None:
    """Return the most lanes of the port above a PCI device; None if it is unknown."""
    port = os.path.dirname(os.path.realpath(host.sys(f"bus/pci/devices/{address}")))
    try:
        return int(read(f"{port}/max_link_width"))
    # Above it is no port of PCI Express, or the GPU is gone.
    except (OSError, ValueError, ArithmeticError):
        return None


def driver_absent(host: Host) -> str | None:
    """Return why no process of this machine can use NCCL, or None; for `Collector.absent`."""
    places = (host.device("nvidiactl"), host.device("dxg"), host.sys("module/nvidia"))
    return None if any(map(os.path.exists, places)) else "no NVIDIA driver, and so no NCCL"


def gpus_absent(host: Host) -> str | None:
    """Return why NVML has nothing to do on this machine, or None.

    Cheap, touches no device; for `Collector.absent`.

    An operator frees the driver with RELEASE: while it exists, the worker that holds NVML open
    ends.
    """
    if os.path.lexists(host.root(RELEASE)):
        return f"released by {RELEASE}"
    if os.path.exists(host.device("nvidiactl")) or os.path.exists(host.device("dxg")):
        return None
    try:
        found = bus(host).gpus()
    except OSError:  # no PCI bus
        found = ()
    return None if found else f"no NVIDIA GPU on the PCI bus and no {host.device('nvidiactl')}"


class PciDevice(NamedTuple):
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


def distance(one: PciDevice, other: PciDevice) -> str:
    """Return the distance between two devices, in the terms of `nvidia-smi topo -m`.

    PIX: one switch; PXB: several; PHB: a host bridge; NODE: two host bridges of a NUMA node; SYS:
    the link between NUMA nodes.
    """
    pairs = zip(one.bridges, other.bridges, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if common > 1:  # below one root port; a switch has an upstream bridge and one per device
        apart = max(len(one.bridges), len(other.bridges)) - common
        return "PIX" if apart <= 1 else "PXB"
    if common == 1:
        return "PHB"
    return "NODE" if one.numa_node == other.numa_node else "SYS"


def _device(place: str) -> PciDevice | None:
    """Return a PCI device of the topology; None if it is no GPU or adapter, or just removed."""
    try:
        kind = read(f"{place}/class")
        vendor = read(f"{place}/vendor").strip()
        if vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES):
            name = "gpu"
        elif vendor == ADAPTERS and kind.startswith(_NETWORK_CLASSES):
            if os.path.lexists(f"{place}/{VIRTUAL}"):
                return None
            name = "adapter"
        else:
            return None
        identity = read(f"{place}/device").strip()
        # As in the kernel, -1 if the firmware does not say; a kernel without NUMA has no file.
        numa = (read_existing(f"{place}/numa_node") or "-1").strip()
    except FileNotFoundError:
        return None
    above = os.path.realpath(place).split("/")[:-1]
    roots = [at for at, part in enumerate(above) if part.startswith("pci")]
    bridges = tuple(above[roots[-1] :]) if roots else ()
    return PciDevice(f"{name}:{identity}", numa, bridges)
