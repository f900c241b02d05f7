"""The pool of connections to other nodes' agents: opens them on demand, keeps them for later calls.

It also says what a failure to connect means.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from dshealthd.core.garbage import free_frames
from dshealthd.core.sockets import listen_address
from dshealthd.core.timing import time_limit
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.protocol import Frames, PeerError, PeerSession, TimeoutMeaning
from dshealthd.probe.peers.resolver import (
    NAME_UNKNOWN,
    Address,
    LookupFailed,
    Resolver,
    UnknownName,
    literal,
)

if TYPE_CHECKING:
    from dshealthd.probe.options import PeerOptions

MAX_IDLE = 16
"""Most idle connections kept."""
IDLE_TIMEOUT = 60.0
"""Seconds for which an idle connection is kept; less than a listener allows."""
FIRST_PATIENCE = 1.0
"""Seconds to connect to each address of a name except the last."""
_NO_ROUTE = {
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
    errno.EADDRNOTAVAIL,
}
_UNACKED = 24
"""Offset of tcpi_unacked in the kernel's struct tcp_info."""
_MOST = 1 << 16
"""Bytes to read at a time."""
_IP_BIND_ADDRESS_NO_PORT = 24
"""Linux: choose the port at connect(2), so that it need not be free towards every other address."""


class Link:
    """A connection to another node's listener, which may be anybody until its answer is verified;
    one request at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Make a link of a connected socket that does not block."""
        self.session: PeerSession | None = None
        """What its requests are signed with; None before the challenges are exchanged."""
        self.idle_since = 0.0
        self._socket = connection

    async def send(self, frame: bytes) -> bytes:
        """Send a frame over the link and return the one that answers it. Raises OSError when the
        connection ends, or FrameError.
        """
        loop, frames = asyncio.get_running_loop(), Frames()
        await loop.sock_sendall(self._socket, frame)
        while True:
            data = await loop.sock_recv(self._socket, _MOST)
            if not data:
                raise ConnectionAbortedError
            if (answer := frames.add(data)) is not None:
                return answer

    def end(self) -> None:
        """Have the request in progress on the link fail; its caller closes the link."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the link at once."""
        if self._socket.fileno() >= 0:
            # A canceled call would do so later, when another socket may have the descriptor.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
            self._socket.close()

    def usable(self) -> bool:
        """Return whether an idle link can be used again: nothing came, and it was not closed."""
        if self._socket.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def unacknowledged(self) -> bool:
        """Return whether data sent over the link is unacknowledged: host down, or packets lost."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED + 4)
        except OSError:
            return True
        return bool(struct.unpack_from("=I", info, _UNACKED)[0])


class ConnectionPool:
    """The connections of one client."""

    def __init__(
        self,
        options: PeerOptions,
        addresses: Callable[[str], tuple[str, int]],
        resolver: Resolver,
        monotonic: Callable[[], float],
    ) -> None:
        """`addresses` returns the host (name or address) and port of a peer."""
        self._addresses = addresses
        self._resolver = resolver
        self._monotonic = monotonic
        self._local = literal(listen_address(options.listen_address)[0] or "")
        """The source address: the one to listen on, if that is numeric."""
        self._idle: OrderedDict[Link, str] = OrderedDict()
        """Idle connections and their peers, longest unused first."""
        self._busy: set[Link] = set()
        self.opened = 0

    def __len__(self) -> int:
        """Return how many connections the pool has, in use or idle."""
        self._prune()
        return len(self._idle) + len(self._busy)

    async def acquire(self, peer: str, key: bytes, on_timeout: TimeoutMeaning) -> Link:
        """Return a connection to a peer: the idle one used last whose session has this key, or a
        new one. Raises PeerError.
        """
        self._prune()
        # The one used last has been idle for the shortest time, so it is the least likely to be
        # closed meanwhile.
        for link in [link for link in reversed(self._idle) if self._idle[link] == peer]:
            del self._idle[link]
            if link.session is not None and link.session.key == key:
                break
            link.close()
        else:
            link = await self._open(peer, on_timeout)
        self._busy.add(link)
        return link

    def release(self, link: Link, peer: str, *, keep: bool) -> None:
        """Keep a connection in the pool for later calls, or close it."""
        self._busy.discard(link)
        if not keep:
            link.close()
            return
        link.idle_since = self._monotonic()
        self._idle[link] = peer
        self._prune()

    def forget(self, peer: str) -> None:
        """Close the pool's idle connections to a peer, and forget its addresses."""
        self._resolver.forget(self._addresses(peer)[0])
        for link in [link for link, whose in self._idle.items() if whose == peer]:
            del self._idle[link]
            link.close()

    async def close(self) -> None:
        """Close all connections of the pool; calls in progress fail."""
        for idle in self._idle:
            idle.close()
        self._idle.clear()
        for busy in self._busy:
            busy.end()
        await self._resolver.close()

    def _prune(self) -> None:
        now = self._monotonic()
        for link in [
            link for link in self._idle if now - link.idle_since > IDLE_TIMEOUT or not link.usable()
        ]:
            del self._idle[link]
            link.close()
        while len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)[0].close()

    async def _open(self, peer: str, on_timeout: TimeoutMeaning) -> Link:
        host, port = self._addresses(peer)
        on_timeout.becomes(
            Outcome.INCONCLUSIVE, "name_timeout"
        )  # the peer has not been contacted yet
        try:
            addresses = await self._resolver.addresses(host)
        except LookupFailed as error:
            reason = NAME_UNKNOWN if isinstance(error, UnknownName) else "name_server"
            raise PeerError(Outcome.INCONCLUSIVE, reason) from error
        on_timeout.becomes(Outcome.UNREACHABLE, "connect_timeout")
        try:
            link = await self._connect(addresses, port)
        except OSError as error:
            free_frames(error)
            raise PeerError(*error_meaning(error)) from error
        self.opened += 1
        return link

    async def _connect(self, addresses: tuple[Address, ...], port: int) -> Link:
        for one in addresses[:-1]:
            try:
                async with time_limit(FIRST_PATIENCE):
                    return await self._connect_one(one, port)
            except OSError:  # TimeoutError is one; the last address's error counts
                continue
        return await self._connect_one(addresses[-1], port)

    async def _connect_one(self, to: Address, port: int) -> Link:
        family, address = to
        connection = socket.socket(family, socket.SOCK_STREAM)
        link = Link(connection)
        try:
            connection.settimeout(0)
            if self._local is not None and self._local[0] == family:
                connection.setsockopt(socket.SOL_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                connection.bind((self._local[1], 0))
            await asyncio.get_running_loop().sock_connect(connection, (address, port))
        except BaseException:
            link.close()
            raise
        return link


def error_meaning(error: OSError) -> tuple[Outcome, str]:
    """Return the outcome and reason for an error on a connection to a peer."""
    if isinstance(error, ConnectionRefusedError):
        return Outcome.REFUSED, "refused"
    if isinstance(error, ConnectionAbortedError):
        return Outcome.REFUSED, "closed"
    if isinstance(error, ConnectionError):
        return Outcome.REFUSED, "reset"
    if isinstance(error, TimeoutError):
        return Outcome.UNREACHABLE, "connect_timeout"
    if error.errno in _NO_ROUTE:
        return Outcome.UNREACHABLE, "no_route"
    if isinstance(error, PermissionError):
        return Outcome.UNREACHABLE, "not_permitted"  # a firewall, here or on the way
    return Outcome.FAILED, "system_error"
