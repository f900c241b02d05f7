"""A link to another node's peer listener, one connection: sends a request, reads its answer.

The server may be anybody until its answer is verified, so the parser accepts only the one form of
answer that a peer sends.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dshealthd.core.garbage import free_transport
from dshealthd.probe.peers.protocol import MAX_BODY

MAX_HEAD = 4096
"""Bytes of an answer's status line and headers."""
_STATUS = re.compile(r"HTTP/1\.1 ([1-5][0-9][0-9]) [\x20-\x7e]{0,64}")
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_LENGTH = re.compile(r"[0-9]{1,5}")
_UNACKED = 24
"""Offset of tcpi_unacked in the kernel's struct tcp_info."""


class BadAnswer(Exception):
    """The data received is not a peer's answer."""


@dataclass(frozen=True, slots=True)
class UnverifiedAnswer:
    """An answer as received, not yet verified."""

    status: int
    headers: Mapping[str, str]
    """Names are in lower case."""
    length: int
    """Bytes of the body."""
    last: bool
    """Whether the server closes the connection after this answer."""
    body: bytes = b""


def parse_head(head: bytes) -> UnverifiedAnswer:
    """Return an answer without its body; BadAnswer for anything ambiguous."""
    try:
        status, *lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError as error:
        raise BadAnswer from error
    match = _STATUS.fullmatch(status)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if (
            not colon
            or _NAME.fullmatch(name) is None
            or name in headers
            or not value.strip(" ").isprintable()
        ):
            raise BadAnswer
        headers[name] = value.strip(" ")
    length = _LENGTH.fullmatch(headers.get("content-length", ""))
    if (
        match is None
        or length is None
        or "transfer-encoding" in headers
        or "content-encoding" in headers
    ):
        raise BadAnswer
    if int(length[0]) > MAX_BODY:
        raise BadAnswer
    return UnverifiedAnswer(
        int(match[1]), headers, int(length[0]), headers.get("connection", "").lower() == "close"
    )


class Link(asyncio.Protocol):
    """A connection; one request at a time."""

    def __init__(self) -> None:
        self.nonce = ""
        """The nonce for the next request; empty if there is none."""
        self.nonce_until = 0.0
        self.idle_since = 0.0
        self.answered = False
        """Whether an answer has come on this connection."""
        self.broken = False
        """Whether no further request can be sent."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._head: UnverifiedAnswer | None = None
        self._waiter: asyncio.Future[UnverifiedAnswer] | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the link's transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self._transport = transport

    @property
    def secured(self) -> bool:
        """Whether the link to the peer is protected with TLS."""
        return (
            self._transport is not None and self._transport.get_extra_info("ssl_object") is not None
        )

    def peer_certificate(self) -> Mapping[str, object]:
        """Return the link's server certificate as `getpeercert()` gives it; empty without TLS."""
        return {} if self._transport is None else self._transport.get_extra_info("peercert") or {}

    def send(self, request: bytes) -> asyncio.Future[UnverifiedAnswer]:
        """Send a request over the link and return a future of its answer. The future raises OSError
        (as ssl's errors are) when the connection ends, or BadAnswer.
        """
        assert self._waiter is None  # noqa: S101 - one request at a time
        assert self._transport is not None  # noqa: S101 - it is connected
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        if self.broken:
            self._finish(ConnectionAbortedError())
        else:
            self._transport.write(request)
        return waiter

    def data_received(self, data: bytes) -> None:
        """Read an answer off the link."""
        self._buffer += data
        try:
            answer = self._parse()
        except BadAnswer as error:
            self._finish(error)
            self.abort()
            return
        if answer is not None:
            self._finish(answer)

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
        # One of TLS has lost its socket a turn of the loop before the link learns of it.
        connection = None if self._transport is None else self._transport.get_extra_info("socket")
        if self.broken or connection is None:
            return False
        poll = select.poll()
        poll.register(connection, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def unacknowledged(self) -> bool:
        """Return whether sent data is unacknowledged: the host is down, or packets are lost."""
        connection = None if self._transport is None else self._transport.get_extra_info("socket")
        if connection is None:
            return True
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED + 4)
        except OSError:
            return True
        return len(info) < _UNACKED + 4 or struct.unpack_from("=I", info, _UNACKED)[0] > 0

    def _parse(self) -> UnverifiedAnswer | None:
        if self._waiter is None:
            raise BadAnswer  # no request is waiting
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD)
            if end < 0:
                if len(self._buffer) >= MAX_HEAD:
                    raise BadAnswer
                return None
            self._head = parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        head = self._head
        if len(self._buffer) < head.length:
            return None
        if len(self._buffer) > head.length:
            raise BadAnswer
        body = bytes(self._buffer)
        self._buffer.clear()
        self._head = None
        self.answered = True
        self.broken = self.broken or head.last
        return replace(head, body=body)

    def _finish(self, result: UnverifiedAnswer | Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if isinstance(result, UnverifiedAnswer):
            waiter.set_result(result)
        else:
            waiter.set_exception(result)
