"""A link to another node's peer listener, one connection: sends a frame, reads its answer.

The listener may be anybody until its answer is verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from typing import TYPE_CHECKING

from dshealthd.probe.peers.protocol import Frames

if TYPE_CHECKING:
    from dshealthd.probe.peers.protocol import PeerSession

_UNACKED = 24
"""Offset of tcpi_unacked in the kernel's struct tcp_info."""
_MOST = 1 << 16
"""Bytes to read at a time."""


class Link:
    """A connection; one request at a time."""

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
