"""The limiter of connections: how many there are at a time, and which were refused."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import logging
import os
import resource
import socket
import struct
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from dshealthd.core.collector import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Sample

log = logging.getLogger(__name__)

OPEN = gauge(
    "dshealthd_web_connections",
    "Open connections to the agent's own server, TLS handshakes included.",
)
LIMIT = gauge(
    "dshealthd_web_connections_limit",
    "Connections served at a time: web.max_connections, or less where the limit of open "
    "files leaves no room for them.",
)
REFUSED = counter(
    "dshealthd_web_connections_refused_total",
    "Connections closed because they passed a limit of the server.",
    "reason",
)
METRICS = (OPEN, LIMIT, REFUSED)

RESERVE = 4
"""Descriptors held for connections when there are no others.

Two Prometheus servers and a person.
"""
DESCRIPTORS_KEPT = 32
"""Descriptors that connections leave to the collectors and their workers."""
_RESET = struct.pack("ii", 1, 0)


class CloseReason(enum.StrEnum):
    """Why the server closed a connection: the values of the label `reason`."""

    TOTAL = "connections"
    ADDRESS = "connections_of_address"
    DESCRIPTORS = "descriptors"
    HANDSHAKE = "tls_handshake"
    CERTIFICATE = "client_certificate"
    HEADERS = "header_timeout"
    RESPONSE = "response_timeout"


def client_of(host: str) -> str:
    """Return whom the limiter counts a peer's address for.

    An IPv4 address itself, of an IPv6 address the /64, since one machine owns that much.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local:  # all neighbours share that prefix
        return str(address)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


class Reserve:
    """Descriptors held back, so that accept(2) works when all others are used.

    One is given up for each connection that is accepted while there are none, and taken back when
    there are some again.
    """

    def __init__(self, size: int) -> None:
        """Hold none yet; `refill` takes up to `size`."""
        self._size = size
        self._held: list[int] = []

    def refill(self) -> None:
        """Take back the reserved descriptors that were given up, as far as there are any."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                # of something that is always there, and at no cost: /proc/self/fd may not be
                self._held.append(os.eventfd(0, os.EFD_CLOEXEC))

    def give(self) -> bool:
        """Give up one reserved descriptor; False if none is left."""
        if not self._held:
            return False
        os.close(self._held.pop())
        return True

    def close(self) -> None:
        """Give up all reserved descriptors."""
        while self.give():
            pass


class Idle(Protocol):
    """A connection that waits for its client's next request."""

    def give_way(self) -> None:
        """Close the idle connection at once, and release its place in the gate."""


class ConnectionLimiter:
    """Counts the open connections and says whether one more may come in.

    A client at its limit gets in if one of its other connections is idle, which is then closed: a
    browser keeps half a dozen open, and a second one behind the same address must not find the page
    half loaded. When all places are taken, the client with the most connections gives up its
    longest idle one for a client that has fewer. Those who hold connections without asking anything
    can therefore not shut out who asks.
    """

    def __init__(self, limit: int, limit_per_address: int) -> None:
        """Admit at most `limit` connections at a time, `limit_per_address` of them from one client."""
        self.limit = limit
        self._limit_per_address = limit_per_address
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[Idle, None]] = {}
        self.total = 0
        self.refused: Counter[CloseReason] = Counter(dict.fromkeys(CloseReason, 0))

    def keep_descriptors(self) -> None:
        """Lower the limit to what the limit of open files leaves, so that a flood does not take the
        collectors' descriptors.
        """
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = max(1, files - len(os.listdir("/proc/self/fd")) - DESCRIPTORS_KEPT)
        if room < self.limit:
            log.warning(
                "serving at most %d connections at a time, not %d: the limit of open files is %d",
                room,
                self.limit,
                files,
            )
            self.limit = room

    async def emptied(self, seconds: float) -> None:
        """Wait until the limiter has no connection left, but no longer than so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.total:  # noqa: ASYNC110 - a transport closes its socket in a later turn of the loop
                    await asyncio.sleep(0.01)

    def admit(self, client: str) -> bool:
        """Count a connection of `client` within the limits, or its refusal."""
        self._make_room(client)
        if self.total >= self.limit:
            self.refused[CloseReason.TOTAL] += 1
        elif self._open[client] >= self._limit_per_address:
            self.refused[CloseReason.ADDRESS] += 1
        else:
            self._open[client] += 1
            self.total += 1
            return True
        return False

    def _make_room(self, client: str) -> None:
        """Close what gives way to a connection of `client`, if there is no place for it."""
        if self._open[client] >= self._limit_per_address:
            self._close_idle(client)
        elif self.total >= self.limit:
            # of equals the one idle for longest: the first, as `_idle` is in the order of resting
            largest = max(self._idle, key=self._open.__getitem__, default=client)
            if self._open[largest] > self._open[client]:
                self._close_idle(largest)

    def _close_idle(self, client: str) -> None:
        """Close the connection of a client that is idle longest, if it has one."""
        for connection in self._idle.get(client, ()):
            connection.give_way()
            return

    def rest(self, client: str, connection: Idle) -> None:
        """Note that a connection of `client` is idle from now on."""
        self._idle.setdefault(client, {})[connection] = None

    def wake(self, client: str, connection: Idle) -> None:
        """Note that a connection of `client` is idle no longer."""
        connections = self._idle.get(client, {})
        connections.pop(connection, None)
        if not connections:
            self._idle.pop(client, None)

    def release(self, client: str) -> None:
        """Take back an admitted connection from the limits."""
        self.total -= 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def samples(self) -> Iterator[Sample]:
        """Yield the limiter's metrics: connections, and those refused."""
        yield OPEN(float(self.total))
        yield LIMIT(float(self.limit))
        for reason, count in self.refused.items():
            yield REFUSED(float(count), reason)


def reset_on_close(connection: socket.socket) -> None:
    """Have a refused socket reset its connection when it is closed.

    What the server closes in order stays in TIME_WAIT on this machine, a minute for every one
    refused; and a client that reads nothing would keep the kernel busy with what was meant for it.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
