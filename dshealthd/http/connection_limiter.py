"""How many connections there are at a time, and which were refused."""

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

from dshealthd.collector import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.collector import Sample

log = logging.getLogger(__name__)

OPEN = gauge("dshealthd_web_connections", "Open connections to the agent's own server, TLS handshakes included.")
LIMIT = gauge(
    "dshealthd_web_connections_limit",
    "Connections served at a time: web.max_connections, or less where the limit of open files leaves no room for them.",
)
REFUSED = counter("dshealthd_web_connections_refused_total", "Connections closed because they passed a limit of the server.", "reason")
METRICS = (OPEN, LIMIT, REFUSED)

DESCRIPTORS_KEPT = 32
"""Descriptors that connections leave to the collectors and their workers."""
_RESET = struct.pack("ii", 1, 0)


class Refusal(enum.StrEnum):
    """Why the server closed a connection: the values of the label `reason`."""

    TOTAL = "connections"
    ADDRESS = "connections_of_address"
    DESCRIPTORS = "descriptors"
    HANDSHAKE = "tls_handshake"
    CERTIFICATE = "client_certificate"
    HEADERS = "header_timeout"
    RESPONSE = "response_timeout"


def client_of(host: str) -> str:
    """Return whom a peer's address counts for: an IPv4 address itself, of an IPv6 address the /64, since one machine owns that much."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local:  # all neighbours share that prefix
        return str(address)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


class Idle(Protocol):
    """A connection that waits for its client's next request."""

    def give_way(self) -> None:
        """Close at once, and release the place in the gate."""


class Gate:
    """Counts the open connections and says whether one more may come in.

    A client at its limit gets in if one of its other connections is idle, which is then closed: a browser keeps half a dozen open, and a
    second one behind the same address must not find the page half loaded. What is idle never makes room for another client: a flood
    would take their connections from those who behave.
    """

    def __init__(self, limit: int, limit_per_address: int) -> None:
        """Admit at most `limit` connections at a time, `limit_per_address` of them from one client."""
        self.limit = limit
        self._limit_per_address = limit_per_address
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[Idle, None]] = {}
        self.total = 0
        self.refused: Counter[Refusal] = Counter(dict.fromkeys(Refusal, 0))

    def keep_descriptors(self) -> None:
        """Lower the limit to what the limit of open files leaves, so that a flood does not take the collectors' descriptors."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = max(1, files - len(os.listdir("/proc/self/fd")) - DESCRIPTORS_KEPT)
        if room < self.limit:
            log.warning("serving at most %d connections at a time, not %d: the limit of open files is %d", room, self.limit, files)
            self.limit = room

    async def emptied(self, seconds: float) -> None:
        """Wait until no connection is left, but no longer than so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.total:  # noqa: ASYNC110 - a transport closes its socket in a later turn of the loop
                    await asyncio.sleep(0.01)

    def admit(self, client: str) -> bool:
        """Count a connection of `client`, or its refusal."""
        if self._open[client] >= self._limit_per_address and client in self._idle:
            next(iter(self._idle[client])).give_way()
        if self.total >= self.limit:
            self.refused[Refusal.TOTAL] += 1
        elif self._open[client] >= self._limit_per_address:
            self.refused[Refusal.ADDRESS] += 1
        else:
            self._open[client] += 1
            self.total += 1
            return True
        return False

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
        """Take back an admitted connection."""
        self.total -= 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def samples(self) -> Iterator[Sample]:
        """Yield the gate's metrics."""
        yield OPEN(float(self.total))
        yield LIMIT(float(self.limit))
        for reason, count in self.refused.items():
            yield REFUSED(float(count), reason)


def reset_on_close(connection: socket.socket) -> None:
    """Have a socket reset its connection when it is closed.

    What the server closes in order stays in TIME_WAIT on this machine, a minute for every one refused; and a client that reads nothing
    would keep the kernel busy with what was meant for it.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
