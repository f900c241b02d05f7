"""NVIDIA's GPUs on the PCI bus, from sysfs: their models, and whether NVML is needed.

The GPUs that should be present, whatever the driver reports.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from dshealthd.core.host import Host, read

if TYPE_CHECKING:
    from pathlib import Path

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
"""VGA controllers and 3D controllers; data-centre GPUs are the latter."""
PASSED_THROUGH = frozenset({"vfio-pci", "pci-stub"})
"""Drivers that hold a GPU for a virtual machine, so that this system cannot use it."""


class Bus:
    """The PCI devices of one machine.

    The type of a device never changes, so a scan costs one directory listing.
    """

    def __init__(self, host: Host) -> None:
        """Read nothing yet."""
        self._host = host
        self._is_gpu: dict[str, bool] = {}
        self._models: dict[str, str] = {}

    def models(self) -> set[str]:
        """Return the device IDs of NVIDIA's GPUs on the bus: several if models differ.

        OSError if the bus cannot be read.
        """
        gpus = self.gpus()
        for address in gpus:
            if address not in self._models:
                place = self._host.sys(f"bus/pci/devices/{address}")
                self._models[address] = read(f"{place}/device").strip()
        return {self._models[address] for address in gpus}

    def gpus(self) -> tuple[str, ...]:
        """Return the addresses of NVIDIA's GPUs, in bus order.

        OSError if the bus cannot be read.
        """
        addresses = os.listdir(self._host.sys("bus/pci/devices"))
        self._is_gpu = {
            address: self._is_gpu[address] if address in self._is_gpu else self._look(address)
            for address in addresses
        }
        return tuple(
            sorted(
                address
                for address, is_gpu in self._is_gpu.items()
                if is_gpu and not self._passed_through(address)
            )
        )

    def _look(self, address: str) -> bool:
        place = self._host.sys(f"bus/pci/devices/{address}")
        try:
            return read(f"{place}/vendor").strip() == NVIDIA and read(f"{place}/class").startswith(
                DISPLAY_CLASSES
            )
        except FileNotFoundError:  # removed since the listing
            return False

    def _passed_through(self, address: str) -> bool:
        try:
            driver = os.readlink(self._host.sys(f"bus/pci/devices/{address}/driver"))
        except OSError:  # no driver is bound
            return False
        return os.path.basename(driver) in PASSED_THROUGH


@functools.cache
def bus(host: Host) -> Bus:
    """Return this process's one PCI `Bus` for a host."""
    return Bus(host)


def gpus_absent(release_file: Path, host: Host) -> str | None:
    """Return why NVML has nothing to do on this machine, or None.

    Cheap, touches no device; for `Collector.absent`.

    An operator frees the driver with the release file: while it exists, the worker that holds NVML
    open ends.
    """
    if os.path.lexists(host.root(str(release_file))):
        return f"released by {release_file}"
    if os.path.exists(host.device("nvidiactl")) or os.path.exists(host.device("dxg")):
        return None
    try:
        found = bus(host).gpus()
    except OSError:  # no PCI bus
        found = ()
    return None if found else f"no NVIDIA GPU on the PCI bus and no {host.device('nvidiactl')}"
