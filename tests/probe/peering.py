"""Two nodes with a peer listener each, in one event loop, and raw clients for one of them.

Run as a module, a listener in a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import selectors
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from blockbuster import BlockBuster

from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import Hello, PeerError, PeerSession, parse_challenge, to_frame
from dshealthd.probe.peers.server import PeerServer

T = TypeVar("T", bound="Callable[..., Any]")
R = TypeVar("R")
KEY, OTHER_KEY = "0123456789abcdef" * 4, "fedcba9876543210" * 4
PATIENT = 60.0
"""Seconds for what is to succeed, as this machine may have other work; it ends when it is done."""
CHALLENGE = "c" * 32


class Time:
    """A clock that stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Skipped(selectors.DefaultSelector):
    """What a loop waits for, on a clock that goes on where nothing else does."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is there, and take no time to wait for the rest."""
        found = super().select(timeout and 0)
        self.now += 0.0 if found else timeout or 0.0
        return found


def at_once(scene: Coroutine[Any, Any, R]) -> tuple[R, float]:
    """Run a scene in which nothing but time passes; return its result, and after which time."""
    waits = Skipped()
    loop = asyncio.SelectorEventLoop(waits)
    loop.time = lambda: waits.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(scene), waits.now


def secret(directory: Path, name: str, *lines: str) -> Path:
    """Write a key file as it must be."""
    path = directory / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
    path.chmod(0o600)
    return path


def keyed(key: Path, **given: Any) -> PeerOptions:
    """Return options for a shared key."""
    return PeerOptions(listen_address="127.0.0.1:0", key_file=key, **given)


async def echo(_sender: str, body: dict[str, Any]) -> dict[str, Any]:
    """Answer an echo."""
    return {"clock": time.time(), "payload": body["payload"]}


PING = {"clock": 1.5, "payload": b"ping"}


class Node:
    """The listener of node `b`."""

    def __init__(self, server: PeerServer) -> None:
        self.server = server

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.server.port

    def metric(self, name: str, *labels: str) -> float:
        """Return what the listener says of itself: one series."""
        return metric(self.server, name, *labels)

    def refused(self, reason: str) -> float:
        """Return how many requests were refused for a reason."""
        return self.metric("requests_refused_total", reason)

    async def raw(self, data: bytes, patience: float = PATIENT) -> bytes:
        """Send bytes and return what comes until the listener closes, or in so many seconds."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return await until_closed(reader, patience)
        finally:
            writer.transport.abort()


async def until_closed(reader: asyncio.StreamReader, patience: float) -> bytes:
    """Return what comes until the other side closes, or for so many seconds."""
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(patience):
            while chunk := await reader.read(65536):
                data += chunk
    return data


def metric(source: Any, name: str, *labels: str) -> float:
    """Return a series of a server's or client's own metrics; 0 if there is none."""
    found = {(sample.metric.name, sample.labels): sample.value for sample in source.samples()}
    return float(found.get((f"dshealthd_probe_peer_{name}", labels), 0.0))


@contextlib.asynccontextmanager
async def listening(options: PeerOptions, me: str = "b", **given: Any) -> AsyncIterator[Node]:
    """Run a listener."""
    members, handlers = (
        given.pop("members", lambda: ("a", "b", "c")),
        given.pop("handlers", {"echo": echo}),
    )
    server = PeerServer(options, me, members, handlers, **given)
    await server.start()
    try:
        yield Node(server)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def calling(
    options: PeerOptions, port: int, me: str = "a", host: str = "127.0.0.1", **given: Any
) -> AsyncIterator[PeerClient]:
    """Make a client that finds every node at one place."""
    client = PeerClient(options, me, lambda _: (host, port), **given)
    try:
        yield client
    finally:
        await client.close()


def run(scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene; a blocking call in its event loop is an error."""
    guard = BlockBuster("dshealthd")
    guard.functions["os.listdir"].can_block_in("http/connection_limiter.py", "keep_descriptors")
    for name in ("os.stat", "os.path.islink", "io.BufferedReader.read", "os.read"):
        if name in guard.functions:
            guard.functions[name].can_block_in("probe/peers/credentials.py", "__init__")
    guard.activate()
    try:
        asyncio.run(asyncio.wait_for(scene, 200))
    finally:
        guard.deactivate()


@contextlib.asynccontextmanager
async def talking(
    options: PeerOptions, caller: PeerOptions | None = None, **given: Any
) -> AsyncIterator[tuple[Node, PeerClient]]:
    """Run a listener and a client of it, with the same options unless the `caller` has others."""
    async with listening(options, **given) as node, calling(caller or options, node.port) as client:
        yield node, client


async def ping(client: PeerClient, deadline: float = PATIENT) -> dict[str, Any]:
    """Return the listener's answer, which must have what it was sent."""
    answer = await client.call("b", "echo", PING, deadline)
    assert answer["payload"] == PING["payload"]
    return answer


async def fails(call: Awaitable[object], outcome: Outcome, reason: str) -> None:
    """Await a call that must end so."""
    with pytest.raises(PeerError) as caught:
        await call
    assert (caught.value.outcome, caught.value.reason) == (outcome, reason)


def may_block(test: T) -> T:
    """Mark a coroutine test in whose event loop calls may block, as those of a command do."""
    test.__dict__["may_block"] = True
    return test


class Raw:
    """A connection on which frames of any make are sent one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def ask(self, frame: bytes) -> bytes:
        """Return the content of the frame that answers one."""
        self.writer.write(frame)
        return await read_frame(self._reader)

    async def begin(self, key: str = KEY, sender: str = "a", receiver: str = "b") -> PeerSession:
        """Exchange challenges, as a stranger can too, and return the session of a key."""
        hello = Hello(sender, receiver, CHALLENGE)
        challenge = parse_challenge(await self.ask(to_frame(bytes(hello))))
        assert challenge is not None
        return PeerSession(key.encode(), hello, challenge)

    async def call(self, session: PeerSession, request: bytes) -> bytes:
        """Return the verified answer to a signed request."""
        answer = session.verified("answer", await self.ask(session.sign("request", request)))
        assert answer is not None
        return answer

    async def closed(self, patience: float = PATIENT) -> bool:
        """Return whether the listener closes the connection within so many seconds."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(patience):
                return await self._reader.read() == b""
        return self._reader.exception() is not None


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the content of the next frame."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4)))


@contextlib.asynccontextmanager
async def connected(node: Node) -> AsyncIterator[Raw]:
    """Open a connection to a listener."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def impersonating(
    serve: Callable[[AsyncIterator[bytes], asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Listen as somebody else; `serve` is given each connection's frames. Yields the port."""

    async def frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while True:
            yield to_frame(await read_frame(reader))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            try:
                await serve(frames(reader), writer)
            finally:
                writer.transport.abort()

    tasks: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        while tasks:  # the server's end waits for them, since Python 3.12
            tasks.pop().cancel()
    await asyncio.sleep(0.05)  # the connections close


@contextlib.contextmanager
def listener_process(
    options: dict[str, Any], environment: dict[str, str] | None = None
) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Run this module as a process; gives port, pid, and a dictionary that has the process's own
    metrics after it has ended.
    """
    command = [sys.executable, "-m", __name__, json.dumps(options)]
    metrics: dict[str, float] = {}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            yield int(process.stdout.readline() or "0"), process.pid, metrics
        finally:
            process.stdin.close()
            metrics.update(json.loads(process.stdout.read() or "{}"))
            errors = process.stderr.read()
            assert process.wait(PATIENT) == 0, errors
            assert "Traceback" not in errors, errors


async def _serve_until_closed(given: dict[str, Any]) -> None:
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), closed.set)
    async with listening(keyed(Path(given["key_file"]))) as node:
        print(node.port, flush=True)
        await closed.wait()
        print(
            json.dumps(
                {
                    ".".join((sample.metric.name, *sample.labels)): sample.value
                    for sample in node.server.samples()
                }
            )
        )


def main() -> None:
    """Listen until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("options", type=json.loads)
    asyncio.run(_serve_until_closed(parser.parse_args().options))


if __name__ == "__main__":
    main()
