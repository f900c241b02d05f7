"""A link to another node's peer listener, one connection: sends a frame, reads its answer.

The listener may be anybody until its answer is verified.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from typing import TYPE_CHECKING

from dshealthd.core.garbage import free_transport
from dshealthd.probe.peers.protocol import FrameError, Frames

if TYPE_CHECKING:
    from dshealthd.probe.peers.protocol import PeerSession

_UNACKED = 24
"""Offset of tcpi_unacked in the kernel's struct tcp_info."""


class Link(asyncio.Protocol):
    """A connection; one request at a time."""

    def __init__(self) -> None:
        self.session: PeerSession | None = None
        """What its requests are signed with; None before the challenges are exchanged."""
        self.idle_since = 0.0
        self.broken = False
        """Whether no further request can be sent."""
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._waiter: asyncio.Future[bytes] | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the link's transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self._transport = transport

    def send(self, frame: bytes) -> asyncio.Future[bytes]:
        """Send a frame over the link and return a future of the one that answers it. The future
        raises OSError when the connection ends, or FrameError.
        """
        assert self._waiter is None  # noqa: S101 - one request at a time
        assert self._transport is not None  # noqa: S101 - it is connected
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        if self.broken:
            self._finish(ConnectionAbortedError())
        else:
            self._transport.write(frame)
        return waiter

    def data_received(self, data: bytes) -> None:
        """Read an answer off the link."""
        try:
            if self._waiter is None:
                raise FrameError  # noqa: TRY301 - nothing was sent that it could answer
            frame = self._frames.add(data)
        except FrameError as error:
            self._finish(error)
            self.abort()
            return
        if frame is not None:
            self._finish(frame)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail the request that waits on the link, if any."""
        if self._transport is not None:
            free_transport(self._transport)
        self.broken = True
        self._finish(exc if isinstance(exc, OSError) else ConnectionAbortedError())
        if not self._lost.done():
            self._lost.set_result(None)

    def eof_received(self) -> bool:
        """Close the link to a peer whose server has closed it."""
        self.broken = True
        return False

    def abort(self) -> None:
        """Close the link at once."""
        self.broken = True
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Close the link at once, and wait until it is closed."""
        self.abort()
        if self._transport is not None:
            await self._lost

    def usable(self) -> bool:
        """Return whether an idle link can be used again. The kernel may know that it is closed
        before the loop has noticed.
        """
        connection = self._socket()
        if self.broken or connection is None:
            return False
        poll = select.poll()
        poll.register(connection, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def unacknowledged(self) -> bool:
        """Return whether sent data is unacknowledged: the host is down, or packets are lost."""
        connection = self._socket()
        if connection is None:
            return True
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED + 4)
        except OSError:
            return True
        return len(info) < _UNACKED + 4 or struct.unpack_from("=I", info, _UNACKED)[0] > 0

    def _socket(self) -> socket.socket | None:
        return None if self._transport is None else self._transport.get_extra_info("socket")

    def _finish(self, result: bytes | Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if isinstance(result, bytes):
            waiter.set_result(result)
        else:
            waiter.set_exception(result)
