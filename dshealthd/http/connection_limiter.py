"""The connection limiter: bounds the open connections, and counts those refused."""

from __future__ import annotations

import enum
import ipaddress
import logging
import os
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import ClassVar, Protocol

from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.timing import holds

log = logging.getLogger(__name__)

OPEN = gauge(
    "dshealthd_web_connections",
    "Open connections to the agent's own server, TLS handshakes included.",
)
REFUSED = counter(
    "dshealthd_web_connections_refused_total",
    "Connections closed because they exceeded a limit of the server; replaced: a newer one took "
    "its place.",
    "reason",
)

RESERVE = 4
"""Descriptors reserved for connections when no others are left.

Enough for two Prometheus servers and a person.
"""
DESCRIPTORS_KEPT = 32
"""Descriptors that connections leave to the collectors and their workers."""
MAX_CLOSING = 16
"""Most evicted connections that may still hold their descriptors."""
MAX_KNOWN = 4096
"""Most clients remembered as known."""
MOMENT = 0.25
"""Seconds for a new connection's request to arrive before it is evicted ahead of idle ones."""
SLOW = 1.0
"""Seconds that an answer may take before its connection can be evicted."""


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
    """Return the client that the limiter counts a peer's address under.

    That is an IPv4 address itself, or the /64 of an IPv6 address, as one machine owns that much.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local:  # all neighbors share that prefix
        return str(address)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


class Evictable(Protocol):
    """A connection that can be evicted."""

    def evict(self) -> None:
        """Close the connection at once, whatever it is doing, and return its place."""


class ConnectionLimiter:
    """Counts the open connections and decides whether to admit one more.

    If no place is left, another connection is evicted. So no one can lock clients out by holding
    connections, from however many addresses: every user of a machine has all of 127.0.0.0/8.

    At its own limit, a client loses its longest idle connection (a browser keeps half a dozen open,
    and a second browser behind the same address must not get half a page), or else the one whose
    request is awaited longest. When all places are taken, the first of these is evicted: of unknown
    clients, the connection whose request is awaited longest, unless it is new; the longest idle one
    of the client with most connections, if the new client has fewer; the one whose request is
    awaited longest, of unknown clients before known ones; the one whose answer takes longest, if it
    is slow. Known clients are those that were answered recently.
    """

    answered_are_known: ClassVar[bool] = True
    """Whether any answer makes its client a known one."""

    def __init__(self, limit: int, limit_per_address: int) -> None:
        """Admit at most `limit` connections at a time, `limit_per_address` of them per client."""
        self.limit = limit
        self._limit_per_address = limit_per_address
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[Evictable, None]] = {}
        self._awaiting: dict[Evictable, tuple[str, float]] = {}
        """Connections whose handshake or headers are awaited, and since when; longest first."""
        self._answering: dict[Evictable, tuple[str, float]] = {}
        """Connections whose request is being answered, likewise."""
        self._known: OrderedDict[str, None] = OrderedDict()
        self.total = 0
        self.closing = 0
        """Evicted connections that may not be closed yet."""
        self.refused: Counter[CloseReason] = Counter(dict.fromkeys(CloseReason, 0))

    def keep_descriptors(self) -> None:
        """Lower the limit on connections to fit that on open files.

        So a flood of connections does not take the collectors' descriptors.
        """
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = max(1, files - len(os.listdir("/proc/self/fd")) - DESCRIPTORS_KEPT)
        if room < self.limit:
            log.warning(
                "serving at most %d connections at a time, not %d: the limit on open files is %d",
                room,
                self.limit,
                files,
            )
            self.limit = room

    async def emptied(self, seconds: float) -> None:
        """Wait until no connection is left, for at most `seconds`."""
        # A transport closes its socket in a later turn of the loop.
        await holds(lambda: not self.total, seconds)

    def admit(self, client: str) -> bool:
        """Admit and count a connection of `client`, or count its refusal and return False."""
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
        """Return whether a connection may be evicted for one of `client` now.

        An evicted connection holds its descriptor for another moment.
        """
        return self.closing < MAX_CLOSING or client in self._known

    def evict(self, connection: Evictable | None) -> None:
        """Close a connection, if any, for a newer one."""
        if connection is not None:
            self.refused[CloseReason.REPLACED] += 1
            self.closing += 1
            connection.evict()

    def close_silent(self) -> None:
        """Close the connections that have not sent a whole request."""
        for connection in [*self._awaiting]:
            self.closing += 1
            connection.evict()

    def _idle_for(self, client: str) -> Evictable | None:
        """Return the longest idle connection of the largest client, if `client` has fewer."""
        # Of equal clients the first one: `_idle` is in the order in which they became idle.
        largest = max(self._idle, key=self._open.__getitem__, default=client)
        return self._longest_idle(largest) if self._open[largest] > self._open[client] else None

    def _awaited(self, seconds: float, *, known: bool) -> Evictable | None:
        """Return the connection whose request has been awaited longest, for at least `seconds`.

        Considers only known clients, or only unknown ones.
        """
        now = time.monotonic()
        for connection, (client, since) in self._awaiting.items():
            if now - since < seconds:
                break
            if (client in self._known) == known:
                return connection
        return None

    def _slow(self) -> Evictable | None:
        for connection, (_, since) in self._answering.items():
            return connection if time.monotonic() - since >= SLOW else None
        return None

    def _longest_idle(self, client: str) -> Evictable | None:
        return next(iter(self._idle.get(client, ())), None)

    def rest(self, client: str, connection: Evictable) -> None:
        """Record that a connection of `client` is idle now."""
        self._wake(client, connection)
        self._idle.setdefault(client, {})[connection] = None
        if self.answered_are_known:
            self.know(client)

    def know(self, client: str) -> None:
        """Remember a client as known; beyond `MAX_KNOWN`, the oldest one is forgotten."""
        self._known[client] = None
        self._known.move_to_end(client)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def awaits(self, client: str, connection: Evictable) -> None:
        """Record that a handshake or headers on a connection of `client` are awaited now."""
        self._wake(client, connection)
        self._awaiting[connection] = client, time.monotonic()

    def answers(self, client: str, connection: Evictable) -> None:
        """Record that a request on a connection of `client` is being answered now."""
        self._wake(client, connection)
        self._answering[connection] = client, time.monotonic()

    def leave(self, client: str, connection: Evictable) -> None:
        """Stop counting a connection of `client`."""
        self._wake(client, connection)
        self.release(client)

    def _wake(self, client: str, connection: Evictable) -> None:
        """Forget the state of a connection of `client`; it has one at most."""
        self._awaiting.pop(connection, None)
        self._answering.pop(connection, None)
        idle = self._idle.get(client, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(client, None)

    def release(self, client: str) -> None:
        """Stop counting an admitted connection."""
        self.total -= 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def samples(self) -> Iterator[Sample]:
        """Yield the limiter's metrics: open and refused connections."""
        yield OPEN(float(self.total))
        for reason, count in self.refused.items():
            yield REFUSED(float(count), reason)
