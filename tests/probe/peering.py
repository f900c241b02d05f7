"""Two nodes with a peer listener each, in one event loop, and raw clients for one of them.

Run as a module, a listener in a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from blockbuster import BlockBuster

from dshealthd.core.options import Duration
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.link import UnverifiedAnswer, parse_head
from dshealthd.probe.peers.protocol import (
    ABSENT,
    ANSWER,
    PeerError,
    RequestClaim,
    parse_answer,
    request_mac,
)
from dshealthd.probe.peers.server import PeerServer
from tests.web import certificates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

    from dshealthd.probe.observation import Outcome

T = TypeVar("T", bound="Callable[..., Any]")
KEY, OTHER_KEY = "0123456789abcdef" * 4, "fedcba9876543210" * 4
PATIENT = 60.0
"""Seconds for what is to succeed, as this machine may have other work; it ends when it is done."""
ECHO = "/peer/v1/echo"
CHALLENGE = "c" * 32


class Time:
    """A clock that stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def secret(directory: Path, name: str, *lines: str) -> Path:
    """Write a key file as it must be."""
    path = directory / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
    path.chmod(0o600)
    return path


def make_certificates(directory: Path) -> None:
    """Make the authority `ca`, another one `other`, from `ca` a certificate for each of `a`, `b`
    and `c`, and bad ones for `a` and `b`.
    """
    certificates.authority(directory, "ca")
    certificates.authority(directory, "other")
    for name in ("a", "b", "c"):
        host = f"DNS:{name}.example"
        certificates.certificate(directory, name, "ca", f"{host},URI:spiffe://example/{name}")
        certificates.certificate(directory, f"{name}-stranger", "other", host)
        certificates.dated(directory, f"{name}-expired", "ca", host, -200_000, -100_000)
        certificates.dated(directory, f"{name}-early", "ca", host, 288, 100_000)
    certificates.certificate(
        directory, "wildcard", "ca", "DNS:*.example,DNS:a.example.org,email:a.example"
    )


def tls(directory: Path, name: str, **given: Any) -> PeerOptions:
    """Return options for TLS with a certificate of `make_certificates`."""
    return PeerOptions(
        listen_address="127.0.0.1:0",
        tls_cert_file=directory / f"{name}.pem",
        tls_key_file=directory / f"{name}.key",
        tls_ca_file=directory / "ca.pem",
        tls_name="{node}.example",
        **timed(given),
    )


def keyed(key: Path, **given: Any) -> PeerOptions:
    """Return options for a shared key."""
    return PeerOptions(listen_address="127.0.0.1:0", key_file=key, **timed(given))


def timed(given: dict[str, Any]) -> dict[str, Any]:
    """Return options with their times as the config has them."""
    return {
        name: Duration(value) if name.endswith("_timeout") else value
        for name, value in given.items()
    }


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


async def until(condition: Callable[[], object], seconds: float = PATIENT) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


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


def request(
    claim: RequestClaim | None, body: bytes, path: str = ECHO, method: str = "POST", extra: str = ""
) -> bytes:
    """Return a request as bytes."""
    head = f"{method} {path} HTTP/1.1\r\nHost: b\r\n" + (
        f"Authorization: {claim}\r\n" if claim else ""
    )
    if "content-length" not in extra.lower():
        head += f"Content-Length: {len(body)}\r\n"
    return (head + extra + "\r\n").encode() + body


def signed(
    nonce: str,
    body: bytes,
    key: str = KEY,
    sender: str = "a",
    receiver: str = "b",
    path: str = ECHO,
    challenge: str = CHALLENGE,
) -> RequestClaim:
    """Return the claim of a request that is signed as a client signs it."""
    claim = RequestClaim(sender, receiver, nonce, challenge)
    return RequestClaim(
        sender, receiver, nonce, challenge, request_mac(key.encode(), path, body, claim)
    )


class Raw:
    """A connection on which requests of any make are sent one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, data: bytes) -> tuple[UnverifiedAnswer, bytes]:
        """Return the answer to one request."""
        self._writer.write(data)
        head = parse_head((await self._reader.readuntil(b"\r\n\r\n"))[:-4])
        return head, await self._reader.readexactly(head.length)

    async def relay(self, data: bytes) -> bytes:
        """Return the answer to one request as it came."""
        self._writer.write(data)
        head = await self._reader.readuntil(b"\r\n\r\n")
        return head + await self._reader.readexactly(parse_head(head[:-4]).length)

    async def nonce(self, sender: str = "a") -> str:
        """Return a nonce as a stranger gets one too."""
        head, _ = await self.ask(request(RequestClaim(sender, "b"), b"", "/peer/v1/nonce"))
        parsed = parse_answer(head.headers[ANSWER.lower()])
        assert parsed is not None
        assert parsed[1] == ABSENT
        return parsed[0]

    async def closed(self, patience: float = PATIENT) -> bool:
        """Return whether the listener closes the connection within so many seconds."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(patience):
                return await self._reader.read() == b""
        return self._reader.exception() is not None


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
    """Listen as somebody else; `serve` is given each connection's requests. Yields the port."""

    async def requests(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            yield head + await reader.readexactly(
                int(head.partition(b"Content-Length: ")[2].split(b"\r")[0])
            )

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            try:
                await serve(requests(reader), writer)
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
    paths = {name: Path(value) for name, value in given.items() if name.endswith("_file")}
    async with listening(
        PeerOptions(**timed({"listen_address": "127.0.0.1:0", **given, **paths}))
    ) as node:
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
