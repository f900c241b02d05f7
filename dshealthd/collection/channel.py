"""The agent's end of a worker's channel: sends frames, and queues frames that arrive."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Self, cast

from dshealthd.core import wire
from dshealthd.core.garbage import free_transport

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

_HELD = wire.LENGTH.size + wire.MAX_FRAME
"""Most bytes that wait to be taken before reading pauses: one frame, or many small ones."""


class Channel(asyncio.Protocol):
    """Frames over a socket.

    It is a protocol, not a stream: most results have already arrived when they are needed, and a
    task per result would take more CPU than unpacking it.
    """

    _transport: asyncio.Transport

    def __init__(self) -> None:
        """Start empty; `opened` connects it."""
        self._received = bytearray()
        self._ended = False
        self._alarm: asyncio.Future[None] | None = None
        """The future that `changed` waits for; None if nothing waits."""

    @classmethod
    async def opened(cls, ours: socket.socket) -> Self:
        """Return a channel over our end of a socket pair, which the channel closes."""
        _, channel = await asyncio.get_running_loop().create_connection(cls, sock=ours)
        return channel

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a frame to the worker."""
        self._transport.write(wire.pack(message))

    def take(self) -> dict[str, Any] | None:
        """Return the message in the next frame; None if it has not fully arrived.

        Raise EOFError if no more can arrive, ValueError with a description of an invalid frame.
        """
        if len(self._received) >= wire.LENGTH.size:
            (size,) = wire.LENGTH.unpack_from(self._received)
            if size > wire.MAX_FRAME:
                message = f"a frame of {size} bytes"
                raise ValueError(message)
            end = wire.LENGTH.size + size
            if len(self._received) >= end:
                body = self._received[wire.LENGTH.size : end]
                del self._received[:end]
                self._transport.resume_reading()
                return _message(body)
        if self._ended:
            raise EOFError
        return None

    async def changed(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - no exception
        """Wait until data arrives or the channel ends, for at most `timeout` seconds."""
        if self._ended:
            return
        loop = asyncio.get_running_loop()
        self._alarm = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, self._ring)
        try:
            await self._alarm
        finally:
            self._alarm = None
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Close the channel, which tells the worker to stop."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to the worker."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Buffer what the worker wrote until it is taken."""
        self._received += data
        if len(self._received) > _HELD:
            self._transport.pause_reading()
        self._ring()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - the end is enough
        """Record that nothing more will arrive."""
        free_transport(self._transport)
        self._ended = True
        self._ring()

    def _ring(self) -> None:
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)


def _message(body: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        what = f"invalid JSON: {error}"
        raise ValueError(what) from error
    if not isinstance(message, dict):
        what = "JSON that is not an object"
        raise ValueError(what)  # noqa: TRY004 - one error type for every invalid frame
    return message
