"""Connections of the peer listener: a stranger's may be evicted, an authenticated node's stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dshealthd.http.connection import Connection
from dshealthd.http.connection_limiter import CloseReason, ConnectionLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.web_request import BaseRequest
    from aiohttp.web_response import StreamResponse
    from aiohttp.web_server import Server

MAX_UNPROVED = 3
"""Unauthenticated requests in a row, that for a nonce included, that end a connection."""
MAX_AGE = 900.0
"""Seconds after which a caller has to connect, and present its certificate, again."""


class PeerConnection(Connection):
    """One caller's connection."""

    __slots__ = ("_opened", "_peer_gate", "_unproved", "proved")

    def __init__(
        self,
        manager: Server,
        gate: PeerGate,
        client: str,
        *,
        header_timeout: float,
        answered: Callable[[BaseRequest, StreamResponse], None],
    ) -> None:
        """Register with the gate as a stranger's connection from `client`."""
        super().__init__(manager, gate, client, header_timeout=header_timeout, answered=answered)
        self.proved = False
        """Whether a request on this connection has proved who sent it."""
        self._unproved = 0
        self._peer_gate = gate
        self._opened = self._loop.time()
        gate.strangers[self] = client

    @property
    def address(self) -> str:
        """The address that the peer's connection comes from."""
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def certificate(self) -> dict[str, Any]:
        """The certificate on a peer's connection as `getpeercert()` gives it; empty without TLS."""
        return {} if self.transport is None else self.transport.get_extra_info("peercert") or {}

    def prove(self) -> None:
        """Note that the current request proved who is at the connection's other end."""
        self.proved = True
        self._unproved = 0
        client = self._peer_gate.strangers.pop(self, None)
        if client is not None:
            self._peer_gate.know(client)

    def doubt(self) -> bool:
        """Note that the current request proved nothing; tell whether the peer may send another."""
        self._unproved += 1
        return self._unproved < MAX_UNPROVED

    @property
    def aged(self) -> bool:
        """Whether the peer's connection is so old that it must be closed and made anew."""
        return self._loop.time() - self._opened > MAX_AGE

    def rest(self) -> None:
        """Record that an answer was sent; a stranger must send its next request soon."""
        super().rest()
        if not self.proved:
            self._allow(self._header_timeout, CloseReason.HEADERS)

    def release(self) -> None:
        """Give up the peer connection's place in the gate."""
        self._peer_gate.strangers.pop(self, None)
        super().release()


class PeerGate(ConnectionLimiter):
    """A gate that, when full, evicts its oldest stranger instead of turning a newcomer away. So
    flooding the listener with connections does not keep nodes out: they need only a few
    milliseconds to authenticate. Strangers go first whose address has never authenticated.
    """

    answered_are_known: ClassVar[bool] = False
    """Only clients that have proved who they are count as known."""

    def __init__(self, limit: int, limit_per_address: int) -> None:
        """Admit `limit` connections at a time, `limit_per_address` of them from one client."""
        super().__init__(limit, limit_per_address)
        self.strangers: dict[PeerConnection, str] = {}
        """Unauthenticated connections and their clients, oldest first."""

    def _make_room(self, client: str) -> None:
        """Evict a stranger for a connection of `client`, if there is no place for it. Never evict
        an authenticated node, however long it is idle: the newcomer may be anyone.
        """
        if not self._may_evict(client):
            return
        if self._open[client] >= self._limit_per_address:
            self.evict(
                next(
                    (connection for connection, whose in self.strangers.items() if whose == client),
                    None,
                )
            )
        elif self.total >= self.limit:
            strangers = (
                connection
                for connection, whose in self.strangers.items()
                if whose not in self._known
            )
            self.evict(next(strangers, None) or next(iter(self.strangers), None))
