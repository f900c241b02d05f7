"""Hostile clients of the peer listener.

Nodes that know the key go on talking, whatever strangers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.probe.peers.connection import MAX_UNPROVED
from dshealthd.probe.peers.credentials import Credentials
from dshealthd.probe.peers.protocol import MAX_BODY, PeerError, RequestClaim
from tests.flood import flooding
from tests.probe.peering import (
    ECHO,
    KEY,
    PATIENT,
    calling,
    connected,
    keyed,
    listener_process,
    listening,
    make_certificates,
    may_block,
    metric,
    ping,
    request,
    secret,
    signed,
    talking,
    tls,
    until,
    until_closed,
)
from tests.probe.peers.test_calls import BODY
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.probe.options import PeerOptions
    from dshealthd.probe.peers.secret_files import Secrets


def options_of(kind: str, tmp_path: Path) -> tuple[dict[str, Any], PeerOptions]:
    """Return options of a listener, for its process, and those of its caller."""
    if kind == "key":
        path = secret(tmp_path, "key", KEY)
        return {"key_file": str(path)}, keyed(path)
    make_certificates(tmp_path)
    files = {"tls_cert_file": "b.pem", "tls_key_file": "b.key", "tls_ca_file": "ca.pem"}
    return {
        "tls_name": "{node}.example",
        **{name: str(tmp_path / file) for name, file in files.items()},
    }, tls(tmp_path, "a")


@pytest.mark.parametrize(("kind", "count", "sources"), [("key", 3000, 4), ("tls", 3000, 400)])
@may_block
async def test_flood_of_connections_takes_nothing_from_nodes(
    tmp_path: Path, kind: str, count: int, sources: int
) -> None:
    """Thousands of stalling connections, from few addresses or many: at most 100 descriptors.
    Calls succeed, on old and new connections.
    """
    theirs, ours = options_of(kind, tmp_path)
    kept: list[float] = []
    made: list[float] = []
    descriptors: list[int] = []
    failed: list[str] = []
    with listener_process(theirs) as (port, pid, metrics):
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
        listening(keyed(key, max_connections=3)) as node,
        calling(keyed(key), node.port) as client,
        connected(node) as first,
        connected(node) as second,
    ):
        await ping(client)
        assert node.metric("connections") == 3
        async with connected(node) as third:
            assert await first.closed()
            await third.nonce()
            async with connected(node) as fourth:
                assert await second.closed()
                await fourth.nonce()
                await ping(client)
        assert metric(client, "client_connections_opened_total") == 1
        assert node.metric("connections_refused_total", "replaced") == 2


class HeldCredentials(Credentials):
    """Credentials whose files lie on a disk that takes its time, when it is held."""

    def __init__(self, options: PeerOptions) -> None:
        super().__init__(options)
        self.answers = asyncio.Event()
        self.answers.set()

    async def current(self) -> Secrets:
        """Return the credentials in force, once the disk has answered."""
        await self.answers.wait()
        return await super().current()


async def test_strangers_make_room_while_credentials_are_read(tmp_path: Path) -> None:
    """Strangers who come while a new connection's certificates are looked at give way themselves,
    not a node in its handshake.
    """
    make_certificates(tmp_path)
    theirs = tls(tmp_path, "b", max_connections=4)
    credentials = HeldCredentials(theirs)
    async with talking(theirs, tls(tmp_path, "a"), credentials=credentials) as (node, client):
        await ping(client)
        client.forget("b")
        await until(lambda: node.metric("connections") == 0)
        with contextlib.ExitStack() as strangers:
            early = asyncio.create_task(ping(client))
            await until(lambda: node.metric("connections") == 1)
            credentials.answers.clear()
            for number in range(1, 9):
                source = (f"127.0.1.{number}", 0)
                strangers.enter_context(
                    socket.create_connection(("127.0.0.1", node.port), PATIENT, source)
                )
                await asyncio.sleep(0.01)
            credentials.answers.set()
            assert (await early)["payload"] == b"ping"
        assert node.metric("connections_refused_total", "replaced") == 5


async def test_strangers_who_come_at_once_make_room_themselves(key: Path) -> None:
    """Of strangers who come in one turn of the loop each takes the place of the one before, not of
    a node that has connected and not asked yet.
    """
    async with talking(keyed(key, max_connections=3), keyed(key)) as (node, client):
        await ping(client)
        async with connected(node) as early:
            await until(lambda: node.metric("connections") == 2)
            with contextlib.ExitStack() as strangers:
                for number in range(1, 9):
                    source = (f"127.0.1.{number}", 0)
                    strangers.enter_context(
                        socket.create_connection(("127.0.0.1", node.port), PATIENT, source)
                    )
                await until(lambda: node.metric("connections_refused_total", "replaced") == 7)
                assert await early.nonce()


async def test_stranger_makes_room_for_its_own_address(key: Path) -> None:
    """A program on a node that fills its address's share does not keep the node's own agent out."""
    async with (
        listening(keyed(key, max_connections_per_address=2)) as node,
        connected(node) as first,
        connected(node) as second,
    ):
        await first.nonce()
        await second.nonce()
        async with calling(keyed(key), node.port) as client:
            await ping(client)
        assert node.metric("connections_refused_total", "replaced") == 1
        assert node.metric("connections_refused_total", "connections_of_address") == 0


async def test_full_of_nodes(key: Path) -> None:
    """Where proved nodes take all places, a further connection is closed and counted."""
    async with (
        listening(keyed(key, max_connections=2)) as node,
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
    "start",
    [b"", b"POST /", request(RequestClaim("a", "b"), b"")[:-2]],
    ids=["nothing", "no line", "no end"],
)
async def test_slow_headers(key: Path, start: bytes) -> None:
    """Headers that trickle in end in time, whatever goes on to come."""
    async with listening(keyed(key, header_timeout=0.3)) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)

        async def drip() -> None:
            writer.write(start)
            while start:
                await asyncio.sleep(0.05)
                writer.write(b"X")

        task = asyncio.create_task(drip())
        watch = Stopwatch()
        await until_closed(reader, PATIENT)
        assert watch.seconds() < 1.0
        task.cancel()
        writer.transport.abort()
        await until(lambda: node.metric("connections_refused_total", "header_timeout") == 1)


async def test_slow_body(key: Path) -> None:
    """A body that trickles in is given up in time."""
    async with listening(keyed(key, header_timeout=0.3)) as node:
        watch = Stopwatch()
        answer = await node.raw(request(signed("0" * 64, BODY), BODY)[:-5])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert watch.seconds() < 1.0
        assert node.refused("slow_body") == 1


async def test_stranger_is_not_kept_idle(key: Path) -> None:
    """A connection that asks for a nonce and then says nothing is closed like a silent one."""
    async with listening(keyed(key, header_timeout=1.0)) as node, connected(node) as raw:
        await raw.nonce()
        watch = Stopwatch()
        assert await raw.closed()
        assert watch.seconds() < 2.2
        await until(lambda: node.metric("connections") == 0)


async def test_strangers_do_not_make_memory_grow(key: Path) -> None:
    """Nonces for any number of senders, and refused calls of theirs, leave nothing behind."""
    async with listening(keyed(key)) as node:
        for number in range(100):
            async with connected(node) as raw:
                for again in range(MAX_UNPROVED - 1):
                    await raw.nonce(f"stranger-{number}-{again}")
                await raw.ask(
                    request(signed("0" * 64, BODY, key="x" * 32, sender=f"s-{number}"), BODY)
                )
        assert not node.server._guard._nonces._senders
        assert not node.server._gate.strangers or len(node.server._gate.strangers) <= 8
        assert not node.server._requests


async def test_answers_that_nobody_reads(key: Path) -> None:
    """A node that asks and reads nothing does not keep its connection for ever."""
    async with listening(keyed(key, header_timeout=0.1)) as node:
        raw_socket = socket.socket()
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw_socket.settimeout(0)
        await asyncio.get_running_loop().sock_connect(raw_socket, ("127.0.0.1", node.port))
        many = request(RequestClaim("a", "b"), b"x" * MAX_BODY, ECHO) * 40
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PATIENT):
                await asyncio.get_running_loop().sock_sendall(raw_socket, many)
        raw_socket.close()
        await until(lambda: node.metric("connections") == 0)
