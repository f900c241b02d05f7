"""Network interfaces of the host: state, speed, MTU, traffic, errors.

From `/proc/net/dev` and `/sys/class/net`.

An interface counts if it has hardware (a `device` link; virtual functions seen from their host do
not count) or is a bond. Loopback, bridges, veth pairs, tunnels and VLANs are left out, and with
them the interfaces that come and go with containers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    NotAvailable,
    Sample,
    SourceError,
    Worker,
    counter,
    gauge,
)
from dshealthd.core.host import Host, integer, lines_of, read
from dshealthd.core.options import option
from dshealthd.core.result import fault_of
from dshealthd.linux.pci import VIRTUAL

UP = gauge(
    "dshealthd_network_up",
    "1 if the interface is operational (operstate up), 0 if not; absent if its driver does not "
    "report it.",
    "device",
)
STATE = gauge(
    "dshealthd_network_state",
    "1 for the interface's RFC 2863 state: up, down, dormant, testing, lowerlayerdown, notpresent, "
    "unknown.",
    *("device", "state"),
)
SPEED = gauge(
    "dshealthd_network_speed_bytes_per_second",
    "Negotiated speed of an interface that is up: 1.25e+09 is 10 Gb/s.",
    "device",
)
MTU = gauge(
    "dshealthd_network_mtu_bytes",
    "Largest packet that the interface can send, without the link-layer header.",
    "device",
)
CARRIER_CHANGES = counter(
    "dshealthd_network_carrier_changes_total",
    "Carrier changes, up or down; a flap counts as two.",
    "device",
)
RECEIVE_BYTES = counter(
    "dshealthd_network_receive_bytes_total",
    "Bytes received, without RDMA traffic, which bypasses the kernel.",
    "device",
)
RECEIVE_ERRORS = counter(
    "dshealthd_network_receive_errors_total",
    "Bad packets received: length, CRC, framing, overrun.",
    "device",
)
RECEIVE_DROPS = counter(
    "dshealthd_network_receive_drops_total",
    "Received packets dropped: for lack of buffers, or of a protocol that this host does not "
    "speak.",
    "device",
)
TRANSMIT_BYTES = counter(
    "dshealthd_network_transmit_bytes_total",
    "Bytes sent, without RDMA traffic, which bypasses the kernel.",
    "device",
)
TRANSMIT_ERRORS = counter(
    "dshealthd_network_transmit_errors_total",
    "Packets that could not be sent: aborted, carrier lost.",
    "device",
)
TRANSMIT_DROPS = counter(
    "dshealthd_network_transmit_drops_total", "Packets dropped before they were sent.", "device"
)
_CLASS = "class/net"
_COLUMNS = {
    RECEIVE_BYTES: 0,
    RECEIVE_ERRORS: 2,
    RECEIVE_DROPS: 3,
    TRANSMIT_BYTES: 8,
    TRANSMIT_ERRORS: 10,
    TRANSMIT_DROPS: 11,
}
"""Column of each metric in a line of `/proc/net/dev`."""
_ALL_COLUMNS = 16
_SPEED_INTERVAL = 60.0
"""Seconds after which the speed of a link is read again if its carrier has not changed."""
_STATES = frozenset({"up", "down", "dormant", "testing", "lowerlayerdown", "notpresent", "unknown"})
_NO_SPEED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""Errors of an interface that just lost its carrier, and of a driver without a speed."""


def parse_net_dev(text: str) -> dict[str, str]:
    """Return the lines of `/proc/net/dev` by interface, unparsed: most may not be wanted."""
    lines = (line.partition(":") for line in lines_of(text)[2:])
    return {name.strip(): columns for name, _, columns in lines}


def parse_columns(text: str) -> list[int]:
    """Return the columns of one line of `/proc/net/dev`; ValueError if malformed."""
    columns = [int(column) for column in text.split()]
    if len(columns) < _ALL_COLUMNS:
        raise ValueError(f"{len(columns)} columns instead of {_ALL_COLUMNS}: {text[:200]!r}")
    return columns


def speed_of(megabits: int) -> float | None:
    """Return bytes per second, given Mb/s from a file `speed`; None for 0 and -1, unknown."""
    return megabits * 1e6 / 8 if megabits > 0 else None


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(CollectorOptions):
    """Options of this collector."""

    include: tuple[str, ...] = option(
        [], 'Interfaces to include besides hardware interfaces, as shell patterns: "br-*".'
    )
    exclude: tuple[str, ...] = option([], 'Interfaces to leave out, as shell patterns: "usb*".')

    def wants(self, name: str, path: str) -> bool:
        """Return whether to report the network interface whose directory is `path`."""
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        if any(fnmatchcase(name, pattern) for pattern in self.include):
            return True
        if os.path.lexists(f"{path}/device"):
            return not os.path.lexists(f"{path}/device/{VIRTUAL}")
        return os.path.lexists(f"{path}/bonding")


@dataclass(slots=True)
class _Interface:
    changes: int = -1
    """Carrier changes when its speed was read."""
    asked: float = 0.0
    """Monotonic time of that read."""
    speed: float | None = None


class Network(Collector):
    """Reads one file, and four small ones per interface.

    The kernel answers all but `speed` itself, without a lock that a driver could hold. `speed`
    waits for the network configuration lock and queries the driver, which queries its firmware;
    either can hang. So the worker enters a part before reading it. Speed changes only with the
    carrier (a bond's with its members), so it is read after a carrier change and otherwise once a
    minute.
    """

    Options = NetworkOptions
    # it runs on every machine, whereas `fabric` is for those with InfiniBand; quarantine of parts
    # isolates it from the worker's other collectors
    worker = Worker.STORAGE

    def __init__(self, options: Any, context: Context, reader: Callable[[str], str] = read) -> None:
        super().__init__(options, context)
        self._reader = reader
        self._interfaces: dict[str, _Interface | None] = {}
        """By name; None for interfaces that are left out, so that this is decided only once."""

    @classmethod
    def absent(cls, options: Any, host: Host) -> str | None:
        """Return why the collector is absent: no interface, or one end of a veth pair alone."""
        root = host.sys(_CLASS)
        names = os.listdir(root) if os.path.isdir(root) else []
        if any(options.wants(name, f"{root}/{name}") for name in names):
            return None
        return f"{root} has no interface with hardware"

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the samples of each network interface; a failing one does not affect the others."""
        path = self.host.proc("net/dev")
        lines = parse_net_dev(self._reader(path))
        for name in self._interfaces.keys() - lines.keys():
            del self._interfaces[name]
        working, fault = False, None
        for name, line in lines.items():
            if (interface := self._known(name)) is None:
                continue
            try:
                columns = parse_columns(line)
                for metric, column in _COLUMNS.items():
                    yield metric(columns[column], name)
                yield from self._interface(name, interface)
                working = True
            except (OSError, ValueError, ArithmeticError) as error:
                fault = fault_of(f"network {name}", error)
                yield fault
        if fault is not None and not working:
            raise SourceError(fault.reason, f"no interface can be read: {fault.detail}")
        if not working:
            raise NotAvailable(f"{path} has no interface with hardware")

    def _known(self, name: str) -> _Interface | None:
        """Return the kept speed of a network interface; None if it is left out."""
        if name not in self._interfaces:
            path = self.host.sys(f"{_CLASS}/{name}")
            self._interfaces[name] = _Interface() if self.options.wants(name, path) else None
        return self._interfaces[name]

    def _interface(self, name: str, interface: _Interface) -> Iterator[Sample | Fault]:
        path = self.host.sys(f"{_CLASS}/{name}")
        state = self._reader(f"{path}/operstate").strip()
        if state not in _STATES:
            raise ValueError(f"{path}/operstate: {state[:40]!r} is not a known state")
        if state != "unknown":
            yield UP(float(state == "up"), name)
        yield STATE(1, name, state)
        yield MTU(self._number(f"{path}/mtu"), name)
        changes = self._number(f"{path}/carrier_changes")
        yield CARRIER_CHANGES(changes, name)
        if state == "up":  # no carrier, no speed: the file answers EINVAL
            yield from self._speed(name, interface, changes)

    def _speed(self, name: str, interface: _Interface, changes: int) -> Iterator[Sample | Fault]:
        now = self.context.monotonic()
        if interface.changes != changes or now - interface.asked >= _SPEED_INTERVAL:
            interface.speed = None
            if (quarantine := self.context.entering(f"network {name}")) is not None:
                yield quarantine
                return
            try:
                interface.speed = speed_of(self._number(self.host.sys(f"{_CLASS}/{name}/speed")))
            except OSError as error:
                if error.errno not in _NO_SPEED:
                    raise
            interface.changes, interface.asked = changes, now
        if interface.speed is not None:
            yield SPEED(interface.speed, name)

    def _number(self, path: str) -> int:
        return integer(path, self._reader(path))
