"""An RDMA adapter in sysfs (the kernel's ABI/stable/sysfs-class-infiniband), and its ports."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dshealthd.core.host import Host, integer, read_existing
from dshealthd.linux.pci import ADAPTERS, VIRTUAL

_PAGE = 4096
_UNKNOWN = (1 << 64) - 1
"""All bits set: the value of a counter that the hardware lacks."""
_ENOTSUPP = 524
"""The kernel's internal "not supported", which some drivers leak; no user-space header has it."""
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, _ENOTSUPP})


def read_attribute(place: str) -> bytes:
    """Return the content of a sysfs attribute, at most a page, in three system calls."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        return os.read(descriptor, _PAGE)
    finally:
        os.close(descriptor)


def parse_state(text: bytes) -> int:
    """Return the number of a port's state from `4: ACTIVE`; ValueError if there is none."""
    return int(text.partition(b":")[0])


def parse_rate(text: bytes) -> float:
    """Return a port's bytes per second from `400 Gb/sec (4X NDR)`; ValueError if malformed."""
    value, unit, *_ = text.split(maxsplit=2) or (b"", b"")
    if unit != b"Gb/sec":
        raise ValueError(f"{text[:40]!r} is not a rate in Gb/sec")
    return float(value) * 1e9 / 8


@dataclass(slots=True)
class Adapter:
    """One registration of an adapter by its driver, until it is removed. Keeps no file open."""

    name: str
    place: str
    """Its directory, free of symbolic links: resolving them costs as much as a read."""
    identity: tuple[int, int]
    """Distinguishes this registration from later ones."""
    ports: tuple[str, ...]
    read: Callable[[str], bytes]
    function: str = ""
    """The directory of its PCI function, which outlives it."""
    virtual: bool = False
    """Whether it is a virtual or scalable function, seen from its host: it comes and goes with
    containers.
    """
    unsupported: set[str] = field(default_factory=set)
    """Files that the driver refuses, read once: the kernel logs some refusals."""

    @classmethod
    def at(cls, link: str, read: Callable[[str], bytes]) -> Adapter:
        """Return the adapter behind `/sys/class/infiniband/NAME`, without a call of its driver."""
        place = os.path.realpath(link)
        ports = tuple(_entries(f"{place}/ports"))
        function = os.path.realpath(f"{place}/device")
        virtual = _is_virtual(function)
        return cls(os.path.basename(link), place, identity(place), ports, read, function, virtual)

    def number(self, place: str) -> int | None:
        """Return the number in a file of the adapter, None if it has none. OSError, ValueError."""
        if (content := self._content(place)) is None:
            return None
        if content.startswith(b"N/A"):  # the kernel's text for a driver without this counter
            self.unsupported.add(place)
            return None
        value = integer(place, content)
        return None if value == _UNKNOWN else value

    @property
    def siblings(self) -> list[str]:
        """The names of the adapters that its PCI function has now."""
        return _entries(f"{self.function}/infiniband")

    @property
    def bonds(self) -> set[str]:
        """The bonds that the network interfaces of its PCI function belong to."""
        net = f"{self.function}/net"
        masters = (os.path.realpath(f"{net}/{name}/master") for name in _entries(net))
        return {os.path.basename(master) for master in masters}

    def text(self, path: str) -> str:
        """Return the line in a file of the adapter; "" if there is none, or it does not apply."""
        try:
            content = self._content(f"{self.place}/{path}")
        except FileNotFoundError:
            return ""
        return (content or b"").decode(errors="replace").strip()

    def _content(self, place: str) -> bytes | None:
        """Return what an adapter's file holds; None if the driver refuses to read it. OSError."""
        if place in self.unsupported:
            return None
        try:
            return self.read(place)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.unsupported.add(place)
            return None

    def target(self, path: str) -> str:
        """Return the base name of the target of an adapter's symbolic link; "" if there is none."""
        link = f"{self.place}/{path}"
        return os.path.basename(os.path.realpath(link)) if os.path.lexists(link) else ""

    def interface(self, port: str) -> str:
        """Return the network interface of an adapter's port; "" if ambiguous."""
        # RoCE only; the GIDs of an InfiniBand port have no interface.
        if name := self.text(f"ports/{port}/gid_attrs/ndevs/0"):
            return name
        names = _entries(f"{self.place}/device/net")
        ours = [
            name for name in names if self.text(f"device/net/{name}/dev_port") == str(int(port) - 1)
        ]
        return ours[0] if len(ours) == 1 else ""

    def counters(self, port: str) -> Iterator[tuple[str, str]]:
        """Yield name and place of each counter that an adapter's port has."""
        for kind in ("counters", "hw_counters"):
            directory = f"{self.place}/ports/{port}/{kind}"
            for name in _entries(directory):
                yield name, f"{directory}/{name}"

    def sensors(self) -> Iterator[tuple[str, str]]:
        """Yield name and path of each temperature sensor, in thousandths of a degree Celsius."""
        for hwmon in _entries(f"{self.place}/device/hwmon"):
            directory = f"device/hwmon/{hwmon}"
            for file in _entries(f"{self.place}/{directory}"):
                if file.startswith("temp") and file.endswith("_input"):
                    sensor = file.removesuffix("_input")
                    name = self.text(f"{directory}/{sensor}_label").lower() or sensor
                    yield name, f"{self.place}/{directory}/{file}"


@dataclass(slots=True)
class PortHistory:
    """State of a port kept from sample to sample, and after its adapter is gone."""

    flaps: int = 0
    active: bool = False
    downed: int | None = None
    """`link_downed` as last read."""
    unconfirmed: int = 0
    """Flaps seen in the port's state that `link_downed` may still count."""

    def observe(self, *, active: bool, downed: int | None) -> None:
        """Record a sample whose `link_downed` was read first: a flap in both counts once."""
        if self.active and not active:
            self.flaps += 1
            self.unconfirmed += 1
        if self.downed is not None and downed is not None:
            grown = downed - self.downed if downed >= self.downed else downed
            confirmed = min(grown, self.unconfirmed)
            self.flaps += grown - confirmed
            self.unconfirmed -= confirmed
        if active:
            self.unconfirmed = 0  # an orderly shutdown is never confirmed
        self.active, self.downed = active, downed


def adapters(host: Host) -> list[str]:
    """Return the names of this machine's RDMA adapters. OSError."""
    return _entries(host.sys("class/infiniband"))


def of_nvidia(host: Host) -> list[str]:
    """Return the names of NVIDIA's adapters: by their vendor, as udev may have renamed mlx5_0 to
    ibp24s0 (rdma-core's rules do so by default). OSError.
    """
    place = host.sys("class/infiniband/{}/device/vendor")
    return [
        name
        for name in adapters(host)
        if (read_existing(place.format(name)) or "").strip() == ADAPTERS
    ]


def elsewhere(host: Host) -> list[str]:
    """Return the names of adapters in other network namespaces, as a container has them to itself
    (`rdma system set netns exclusive`), but not of virtual functions. OSError.

    There the kernel hides an adapter, but not the device through which programs open it.
    """
    here, found = adapters(host), []
    for verbs in _entries(host.sys("class/infiniband_verbs")):
        place = host.sys(f"class/infiniband_verbs/{verbs}")
        name = (read_existing(f"{place}/ibdev") or "").strip() if verbs.startswith("u") else ""
        if name and name not in here and not _is_virtual(f"{place}/device"):
            found.append(name)
    return found


def identity(place: str) -> tuple[int, int]:
    """Return what distinguishes an adapter's directory from a later one with the same name."""
    status = os.stat(place)
    return status.st_dev, status.st_ino


def _is_virtual(function: str) -> bool:
    """Return whether a device is a part of an adapter: a virtual function, or a scalable one of
    mlx5.
    """
    return any(os.path.lexists(f"{function}/{file}") for file in (VIRTUAL, "sfnum"))


def _entries(directory: str) -> list[str]:
    """Return the names in an adapter's directory, sorted; empty if there is no such directory."""
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
