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
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, ClassVar, Protocol

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
    "Connections closed because they passed a limit of the server; replaced: a newer one took "
    "its place.",
    "reason",
)
METRICS = (OPEN, LIMIT, REFUSED)

RESERVE = 4
"""Descriptors held for connections when there are no others.

Two Prometheus servers and a person.
"""
DESCRIPTORS_KEPT = 32
"""Descriptors that connections leave to the collectors and their workers."""
MAX_CLOSING = 16
"""Evicted connections that may still have their descriptors."""
MAX_KNOWN = 4096
"""Clients remembered as known."""
MOMENT = 0.25
"""Seconds that a new connection has for its request before it gives way rather than idle ones."""
SLOW = 1.0
"""Seconds that an answer may take before its connection gives way."""
_RESET = struct.pack("ii", 1, 0)


class CloseReason(enum.StrEnum):
    """Why the server closed a connection: the values of the label `reason`."""

    TOTAL = "connections"
    ADDRESS = "connections_of_address"
    REPLACED = "replaced"
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


class Evictable(Protocol):
    """A connection that can give way."""

    def evict(self) -> None:
        """Close the connection at once, whatever it is at, and release its place in the gate."""


class ConnectionLimiter:
    """Counts the open connections and says whether one more may come in.

    Where there is no place, another connection gives way, so that nobody can shut out those who ask
    by holding connections, from however many addresses: every user of a machine has all of
    127.0.0.0/8. A client at its limit gives up an idle one of its own (a browser keeps half a dozen
    open, and a second one behind the same address must not find the page half loaded), or the one
    whose request is awaited for longest. When all places are taken, these give way in turn: the one
    whose request is awaited for longest, unless it has just come; the longest idle one of the
    client with the most connections, for a client that has fewer; the one whose request is awaited
    for longest; and the one that has been slow to take its answer for longest. Those of clients
    that are not known, as they have not been answered lately, go first.
    """

    answered_are_known: ClassVar[bool] = True
    """Whether an answer, of whatever kind, makes its client a known one."""

    def __init__(self, limit: int, limit_per_address: int) -> None:
        """Admit at most `limit` connections at a time, `limit_per_address` of them from one client."""
        self.limit = limit
        self._limit_per_address = limit_per_address
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[Evictable, None]] = {}
        self._awaiting: dict[Evictable, tuple[str, float]] = {}
        """Those whose handshake or headers are to come, and since when; longest first."""
        self._answering: dict[Evictable, tuple[str, float]] = {}
        """Those whose request is being answered, likewise."""
        self._known: OrderedDict[str, None] = OrderedDict()
        self.total = 0
        self.closing = 0
        """Evicted connections that may not have ended yet."""
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
        if not self._may_evict(client):
            return
        if self._open[client] >= self._limit_per_address:
            own = (one for one, (whose, _) in self._awaiting.items() if whose == client)
            self.evict(self._longest_idle(client) or next(own, None))
        elif self.total >= self.limit:
            self.evict(
                self._awaited(MOMENT, known=False)
                or self._idle_for(client)
                or self._awaited(0.0, known=False)
                or self._awaited(0.0, known=True)
                or self._slow()
            )

    def _may_evict(self, client: str) -> bool:
        """Tell whether another connection may give way to one of `client` now.

        What was evicted still has its descriptor for a moment.
        """
        return self.closing < MAX_CLOSING or client in self._known

    def evict(self, connection: Evictable | None) -> None:
        """Close a connection for a newer one; nothing where there is none."""
        if connection is not None:
            self.refused[CloseReason.REPLACED] += 1
            self.closing += 1
            connection.evict()

    def _idle_for(self, client: str) -> Evictable | None:
        """Return the longest idle connection of the client that has most, if `client` has fewer."""
        # of equals the one idle for longest: the first, as `_idle` is in the order of resting
        largest = max(self._idle, key=self._open.__getitem__, default=client)
        return self._longest_idle(largest) if self._open[largest] > self._open[client] else None

    def _awaited(self, seconds: float, *, known: bool) -> Evictable | None:
        """Return the connection whose request has been awaited for longest, and for so many seconds
        at least, of those whose client is known or is not.
        """
        now = time.monotonic()
        for connection, (client, since) in self._awaiting.items():
            if now - since < seconds:
                break
            if (client in self._known) == known:
                return connection
        return None

    def _slow(self) -> Evictable | None:
        """Return the connection whose answer takes longest, if it takes long."""
        for connection, (_, since) in self._answering.items():
            return connection if time.monotonic() - since >= SLOW else None
        return None

    def _longest_idle(self, client: str) -> Evictable | None:
        return next(iter(self._idle.get(client, ())), None)

    def rest(self, client: str, connection: Evictable) -> None:
        """Note that a connection of `client` is idle from now on."""
        self._wake(client, connection)
        self._idle.setdefault(client, {})[connection] = None
        if self.answered_are_known:
            self.know(client)

    def know(self, client: str) -> None:
        """Remember a client as known; the one that was known for longest is forgotten for it."""
        self._known[client] = None
        self._known.move_to_end(client)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def awaits(self, client: str, connection: Evictable) -> None:
        """Note that a handshake or headers on a connection of `client` are awaited from now on."""
        self._wake(client, connection)
        self._awaiting[connection] = client, time.monotonic()

    def answers(self, client: str, connection: Evictable) -> None:
        """Note that a request on a connection of `client` is answered from now on."""
        self._wake(client, connection)
        self._answering[connection] = client, time.monotonic()

    def leave(self, client: str, connection: Evictable) -> None:
        """Take a connection of `client` back from the limits."""
        self._wake(client, connection)
        self.release(client)

    def _wake(self, client: str, connection: Evictable) -> None:
        """Forget what a connection of `client` was at."""
        self._awaiting.pop(connection, None)
        self._answering.pop(connection, None)
        idle = self._idle.get(client, {})
        idle.pop(connection, None)
        if not idle:
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
