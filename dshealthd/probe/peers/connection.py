"""Connections of the peer listener: those of strangers make room, those of proved nodes stay."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from dshealthd.http.connection import Connection
from dshealthd.http.connection_limiter import CloseReason, ConnectionLimiter, reset_on_close

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.web_request import BaseRequest
    from aiohttp.web_response import StreamResponse
    from aiohttp.web_server import Server

MAX_UNPROVED = 3
"""Requests in a row without proof of who sends them; the connection ends with them.

A nonce is asked for in one.
"""
MAX_KNOWN = 4096
"""Addresses remembered from which a node has proved who it is."""
MAX_CLOSING = 16
"""Evicted connections that may still have their descriptors."""
MAX_AGE = 900.0
"""Seconds after which a connection ends with its next answer, so that its certificate is shown
again.
"""


class PeerConnection(Connection):
    """One caller's connection."""

    __slots__ = ("_evicted", "_opened", "_peer_gate", "_unproved", "proved")

    def __init__(
        self,
        manager: Server,
        gate: PeerGate,
        client: str,
        *,
        header_timeout: float,
        answered: Callable[[BaseRequest, StreamResponse], None],
    ) -> None:
        """Take the place of `client` in the gate."""
        super().__init__(manager, gate, client, header_timeout=header_timeout, answered=answered)
        self.proved = False
        """Whether a request on this connection has proved who sent it."""
        self._unproved = 0
        self._evicted = False
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time for the peer's first request's headers on this connection."""
        if self._client is None:  # it was evicted before; its task, cancelled, closes it
            self.opening = None
        else:
            super().connection_made(transport)

    def prove(self) -> None:
        """Note that the request in hand proved who is at the connection's other end."""
        self.proved = True
        self._unproved = 0
        client = self._peer_gate.strangers.pop(self, None)
        if client is not None:
            self._peer_gate.know(client)

    def doubt(self) -> bool:
        """Note that the request in hand proved nothing; tell whether the peer may send another."""
        self._unproved += 1
        return self._unproved < MAX_UNPROVED

    @property
    def aged(self) -> bool:
        """Whether the peer's connection has been open for so long that it is to be made anew."""
        return self._loop.time() - self._opened > MAX_AGE

    async def finish_response(
        self, request: BaseRequest, resp: StreamResponse, start_time: float | None
    ) -> tuple[StreamResponse, bool]:
        """Answer a peer; a connection without proof of who it is must ask again soon."""
        done = await super().finish_response(request, resp, start_time)
        if not self.proved:
            self._allow(self._header_timeout, CloseReason.HEADERS)
        return done

    def evict(self) -> None:
        """Close the peer's connection in the middle of whatever it is, and give the place back."""
        self.release()
        self._evicted = True
        if self.opening is not None:
            self.opening.add_done_callback(self._end)
            # After the task has begun: one that has not would leave the socket open.
            self._loop.call_soon(self.opening.cancel)
        elif isinstance(self.transport, asyncio.Transport):
            reset_on_close(self.transport.get_extra_info("socket"))
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the peer connection's place in the gate back."""
        self._end()
        super().connection_lost(exc)

    def _end(self, _task: object = None) -> None:
        if self._evicted:
            self._evicted = False
            self._peer_gate.closing -= 1

    def release(self) -> None:
        """Give the peer connection's place in the gate back."""
        self._peer_gate.strangers.pop(self, None)
        super().release()


class PeerGate(ConnectionLimiter):
    """A gate where a newcomer takes the place of the stranger that has been there longest, instead
    of being turned away.

    So whoever fills the listener with connections does not keep the nodes out: theirs need a few
    milliseconds until they are proved. And strangers at addresses from which nobody has proved
    anything yet go first.
    """

    def __init__(self, limit: int, limit_per_address: int) -> None:
        """Admit at most `limit` connections at a time, `limit_per_address` of them from one client."""
        super().__init__(limit, limit_per_address)
        self.strangers: dict[PeerConnection, str] = {}
        """The connections that have proved nothing yet and whose they are, oldest first."""
        self.evicted = 0
        self.closing = 0
        """Evicted connections that may not have ended yet."""
        self._known: OrderedDict[str, None] = OrderedDict()

    def _make_room(self, client: str) -> None:
        """Evict a stranger for a connection of `client`, if there is no place for it.

        Never a node that has proved who it is, however long it is idle: the newcomer has not.
        """
        if self.closing >= MAX_CLOSING and client not in self._known:
            # it is refused, if there is no place: what was evicted still has its descriptor for a
            # moment
            pass
        elif self._open[client] >= self._limit_per_address:
            self._evict(
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
            self._evict(next(strangers, None) or next(iter(self.strangers), None))

    def know(self, client: str) -> None:
        """Note that a connection from this address proved who it is."""
        self._known[client] = None
        self._known.move_to_end(client)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _evict(self, connection: PeerConnection | None) -> None:
        if connection is not None:
            self.evicted += 1
            self.closing += 1
            connection.evict()
