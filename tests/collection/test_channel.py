"""Frames of a worker arrive whole and in order, and what is none is refused, however it comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from dshealthd.collection import worker_process as module
from dshealthd.collection.worker_process import Channel
from dshealthd.core import wire

LIMIT = 60.0


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[Channel, socket.socket]]:
    """Give a channel and the worker's end of it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003 - positional only
    theirs.setblocking(False)  # noqa: FBT003 - positional only
    with theirs:
        channel = await Channel.opened(ours)
        try:
            yield channel, theirs
        finally:
            channel.close()


async def taken(channel: Channel) -> dict[str, object]:
    """Return the next message, waiting for it."""
    async with asyncio.timeout(LIMIT):
        while (message := channel.receive()) is None:
            await channel.changed()
    return message


async def test_pieces_and_several_at_once() -> None:
    """A frame is taken once its last byte is there; those behind it keep their order."""
    async with opened() as (channel, worker):
        frames = b"".join(wire.pack({"number": number}) for number in range(3))
        for byte in frames[:-1]:
            worker.send(bytes([byte]))
        assert [await taken(channel) for _ in range(2)] == [{"number": 0}, {"number": 1}]
        await channel.changed(0.05)
        assert channel.receive() is None
        worker.send(frames[-1:])
        assert await taken(channel) == {"number": 2}


@pytest.mark.parametrize(("frame", "what"), [
    (wire.LENGTH.pack(4) + b"null", "JSON that is not an object"),
    (wire.LENGTH.pack(2) + b"[]", "JSON that is not an object"),
    (wire.LENGTH.pack(3) + b"{a}", "invalid JSON: Expecting"),
    (wire.LENGTH.pack(2) + b"\xff\xfe", "invalid JSON: "),
    (wire.LENGTH.pack(wire.MAX_FRAME + 1), f"a frame of {wire.MAX_FRAME + 1} bytes"),
])  # fmt: skip
async def test_what_is_no_frame(frame: bytes, what: str) -> None:
    """It is refused with what it is, and is not waited for."""
    async with opened() as (channel, worker):
        worker.send(frame)
        with pytest.raises(ValueError, match=what):
            await taken(channel)


async def test_the_end() -> None:
    """What arrived before the end is taken first; then it is known that nothing will come."""
    async with opened() as (channel, worker):
        worker.send(wire.pack({"number": 1}) + b"\0\0")
        worker.close()
        assert await taken(channel) == {"number": 1}
        with pytest.raises(EOFError):
            await taken(channel)
        async with asyncio.timeout(LIMIT):
            await channel.changed()  # at once


@pytest.mark.parametrize("more", [0, 1])
async def test_reading_pauses_beyond_a_frame(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """What a frame may have is read even if nothing is taken, and no byte more is asked for
    until that is taken.
    """
    monkeypatch.setattr(module, "_HELD", 100)
    frames = 2 * (wire.LENGTH.pack(56) + b'{"number": 1}'.ljust(56))
    async with opened() as (channel, worker):
        worker.send(frames[: 100 + more])
        await channel.changed(LIMIT)
        assert channel._transport.is_reading() is (more == 0)
        assert await taken(channel) == {"number": 1}
        worker.send(frames[100 + more :])
        assert await taken(channel) == {"number": 1}
