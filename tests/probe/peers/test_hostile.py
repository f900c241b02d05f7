"""Hostile clients of the peer listener.

Nodes that know the key go on talking, whatever strangers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from dshealthd.http.connection import Connection
from dshealthd.http.connection_limiter import CloseReason
from dshealthd.probe.peers import connection
from dshealthd.probe.peers.guard import PeerLimits
from dshealthd.probe.peers.protocol import Hello, PeerError, to_frame
from tests.flood import flooding
from tests.probe.peering import (
    CHALLENGE,
    OTHER_KEY,
    PATIENT,
    Node,
    Raw,
    calling,
    connected,
    keyed,
    listener_process,
    listening,
    may_block,
    metric,
    ping,
    talking,
    until_closed,
)
from tests.probe.peers.test_calls import REQUEST
from tests.stopwatch import Stopwatch
from tests.waiting import eventually

HELLO = to_frame(bytes(Hello("a", "b", CHALLENGE)))
LENIENT = PeerLimits(patience=PATIENT)


def hurry(node: Node, seconds: float) -> None:
    """Give the only connection so many seconds for a frame, once it has been through what comes
    before.
    """
    connection: Any
    (connection,) = node.server._gate._awaiting
    connection._header_timeout = seconds


@pytest.mark.parametrize(("count", "sources"), [(3000, 4), (3000, 400)])
@may_block
async def test_flood_of_connections_takes_nothing_from_nodes(
    key: Path, count: int, sources: int
) -> None:
    """Thousands of stalling connections, from few addresses or many: at most 100 descriptors.
    Calls succeed, on old and new connections.
    """
    ours = keyed(key)
    kept: list[float] = []
    made: list[float] = []
    descriptors: list[int] = []
    failed: list[str] = []
    with listener_process({"key_file": str(key)}) as (port, pid, metrics):
        async with calling(ours, port) as client, calling(ours, port) as newcomer:
            await ping(client)
            end = time.monotonic() + 200
            with flooding(port, sources) as tried:
                while (len(made) < 50 or tried() < count) and time.monotonic() < end:
                    watch = Stopwatch(pid)
                    await ping(client)
                    kept.append(watch.seconds())
                    watch = Stopwatch(pid)
                    newcomer.forget("b")
                    try:
                        await ping(newcomer)
                        made.append(watch.seconds())
                    except PeerError as error:
                        failed.append(str(error))
                    descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
                    await asyncio.sleep(0.02)
            assert metric(client, "client_connections_opened_total") == 1
    assert len(kept) >= 5
    assert max(kept) < 1.0
    assert max(descriptors) <= 100
    assert len(failed) <= 0.02 * len(made), failed
    assert sorted(made)[len(made) // 2] < 1.0
    refused = sum(
        value
        for name, value in metrics.items()
        if name.startswith("dshealthd_probe_peer_connections_refused_total")
    )
    assert refused > count / 2  # the others had left the kernel's queue before they were accepted


async def test_stranger_makes_room(key: Path) -> None:
    """When the listener is full, the connection that has proved nothing for the longest gives way;
    one that has proved itself does not.
    """
    async with (
        listening(keyed(key), limits=PeerLimits(connections=3)) as node,
        calling(keyed(key), node.port) as client,
        connected(node) as first,
        connected(node) as second,
    ):
        await ping(client)
        assert node.metric("connections") == 3
        async with connected(node) as third:
            assert await first.closed()
            await third.begin()
            async with connected(node) as fourth:
                assert await second.closed()
                await fourth.begin()
                await ping(client)
        assert metric(client, "client_connections_opened_total") == 1
        assert node.metric("connections_refused_total", "replaced") == 2


async def test_strangers_who_come_at_once_make_room_themselves(key: Path) -> None:
    """Of strangers who come in one turn of the loop each takes the place of the one before, not of
    a node that has connected and not asked yet.
    """
    async with talking(keyed(key)) as (node, client):
        await ping(client)
        async with connected(node) as early:
            await eventually(lambda: node.metric("connections") == 2)
            with contextlib.ExitStack() as strangers:
                for number in range(1, 1 + 48 - 2 + 7):
                    source = (f"127.0.1.{number}", 0)
                    strangers.enter_context(
                        socket.create_connection(("127.0.0.1", node.port), PATIENT, source)
                    )
                await eventually(lambda: node.metric("connections_refused_total", "replaced") == 7)
                assert await early.begin()


async def test_stranger_makes_room_for_its_own_address(key: Path) -> None:
    """A program on a node that fills its address's share does not keep the node's own agent out."""
    async with listening(keyed(key)) as node, contextlib.AsyncExitStack() as strangers:
        for _ in range(8):
            await (await strangers.enter_async_context(connected(node))).begin()
        async with calling(keyed(key), node.port) as client:
            await ping(client)
        assert node.metric("connections_refused_total", "replaced") == 1
        assert node.metric("connections_refused_total", "connections_of_address") == 0


async def test_full_of_nodes(key: Path) -> None:
    """Where proved nodes take all places, a further connection is closed and counted."""
    async with (
        listening(keyed(key), limits=PeerLimits(connections=2)) as node,
        calling(keyed(key), node.port) as one,
        calling(keyed(key), node.port, me="c") as other,
    ):
        await ping(one)
        await ping(other)
        with contextlib.suppress(ConnectionError):
            assert await node.raw(b"") == b""
        assert node.metric("connections_refused_total", "connections") == 1
        await ping(one)


@pytest.mark.parametrize(
    "start", [b"", HELLO[:2], HELLO[:20]], ids=["nothing", "no length", "no end"]
)
async def test_slow_frames(key: Path, start: bytes) -> None:
    """A frame that trickles in ends in time, whatever goes on to come."""
    async with listening(keyed(key), limits=PeerLimits(patience=0.3)) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)

        async def drip() -> None:
            writer.write(start)
            for byte in HELLO[len(start) : -1] if start else b"":
                await asyncio.sleep(0.05)
                writer.write(bytes((byte,)))

        task = asyncio.create_task(drip())
        watch = Stopwatch()
        await until_closed(reader, PATIENT)
        assert watch.seconds() < 1.0
        task.cancel()
        writer.transport.abort()
        await eventually(lambda: node.metric("connections_refused_total", "header_timeout") == 1)


async def test_slow_frames_of_a_node(key: Path) -> None:
    """A node that has proved itself has no more time for a request that it has begun."""
    async with listening(keyed(key), limits=LENIENT) as node, connected(node) as raw:
        session = await raw.begin()
        hurry(node, 0.3)
        await raw.call(session, REQUEST)
        await asyncio.sleep(0.6)  # idle for longer
        raw.writer.write(session.sign("request", REQUEST)[:-5])
        assert await raw.closed()
        assert node.metric("connections_refused_total", "header_timeout") == 1


async def test_idle_node(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's connection without a request ends too, later, and nobody is refused."""
    monkeypatch.setattr(connection, "IDLE_TIMEOUT", 0.1)
    async with listening(keyed(key)) as node, connected(node) as raw:
        await raw.call(await raw.begin(), REQUEST)
        assert await raw.closed()
        assert node.metric("connections_refused_total", "header_timeout") == 0


async def test_how_long_a_stranger_may_take(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds for each of its frames."""
    allowed: list[tuple[float, CloseReason]] = []

    def allow(_connection: Connection, *given: Any) -> None:
        allowed.append(given)

    monkeypatch.setattr(Connection, "_allow", allow)
    async with listening(keyed(key)) as node, connected(node) as raw:
        await raw.begin()
        await eventually(lambda: len(allowed) == 3)
    seconds = [most for most, reason in allowed if reason is CloseReason.HEADERS]
    assert seconds == [5.0, 5.0]


async def test_stranger_is_not_kept_idle(key: Path) -> None:
    """A connection that asks for a challenge and then says nothing is closed like a silent one."""
    async with (
        listening(keyed(key), limits=PeerLimits(patience=1.0)) as node,
        connected(node) as raw,
    ):
        await raw.begin()
        watch = Stopwatch()
        assert await raw.closed()
        assert watch.seconds() < 2.2
        await eventually(lambda: node.metric("connections") == 0)


async def test_strangers_do_not_make_memory_grow(key: Path) -> None:
    """Challenges for any number of senders, and refused calls of theirs, leave nothing behind."""
    async with listening(keyed(key)) as node:
        for number in range(100):
            async with connected(node) as raw:
                session = await raw.begin(OTHER_KEY, f"stranger-{number}")
                assert await raw.ask(session.sign("request", REQUEST)) == b""
        assert not node.server._guard._calls
        assert not node.server._requests
        await eventually(lambda: not node.server._gate.total)


async def test_answers_that_nobody_reads(key: Path) -> None:
    """A node that asks and reads nothing has its connection closed, and nothing piles up."""

    async def large(_sender: str, _body: dict[str, object]) -> dict[str, object]:
        return {"clock": 1.0, "payload": b"x" * 48000}

    async with listening(keyed(key), limits=LENIENT, handlers={"echo": large}) as node:
        raw_socket = socket.socket()
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await asyncio.to_thread(raw_socket.connect, ("127.0.0.1", node.port))
        reader, writer = await asyncio.open_connection(sock=raw_socket)
        session = await Raw(reader, writer).begin()
        hurry(node, 0.1)
        writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's has it
        for answered in range(1, 1000):
            writer.write(session.sign("request", REQUEST))
            session._number += 1  # as if the answer had been read
            while node.metric("requests_total", "echo", "ok") < answered:
                if not node.metric("connections"):
                    break
                await asyncio.sleep(0.005)
            if not node.metric("connections"):
                break
        assert 1 < answered < 500
        writer.transport.abort()
