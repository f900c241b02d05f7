"""CPU and time of an authenticated call between two agents, on each side.

    python -m bench.bench_peer [--calls 3000]

The listener is a process of its own. In the same run: aiohttp's client with the same bytes, to a
handler that authenticates nothing, which is less than what a call needs. Prints a table in
Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.processes import cpu, table
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.guard import PeerLimits
from dshealthd.probe.peers.server import PeerServer
from tests.probe.peering import KEY, secret

WARM_UP = 200
SIZES = (8, 32768)


class Members:
    """Two nodes."""

    names = ("a", "b")


def options(directory: Path) -> PeerOptions:
    """Return the options of a node."""
    return PeerOptions(listen_address="127.0.0.1:0", key_file=directory / "key")


async def serve(directory: Path, kind: str) -> None:
    """Serve echoes until standard input ends."""

    async def echo(_sender: str, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def plain(request: web.BaseRequest) -> web.Response:
        return web.Response(body=json.dumps(json.loads(await request.read())).encode())

    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    if kind == "aiohttp":
        server = await asyncio.get_running_loop().create_server(web.Server(plain), "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await ended.wait()
        server.close()
        return
    limits = PeerLimits(calls=10**9)
    peer = PeerServer(options(directory), "b", lambda: Members.names, {"echo": echo}, limits=limits)
    await peer.start()
    print(peer.port, flush=True)
    await ended.wait()
    await peer.close()


async def measure(
    directory: Path, kind: str, pid: int, port: int, size: int, calls: int
) -> list[str]:
    """Return a row: calls per second, CPU of the caller and of the listener per call in
    microseconds.
    """

    async def timed(call: Callable[[], Awaitable[object]]) -> list[str]:
        for _ in range(WARM_UP):
            await call()
        started, ours, theirs = time.perf_counter(), cpu(os.getpid()), cpu(pid)
        for _ in range(calls):
            await call()
        took = time.perf_counter() - started
        spent = [cpu(os.getpid()) - ours, cpu(pid) - theirs]
        return [
            kind,
            str(size),
            f"{calls / took:,.0f}",
            *(f"{1e6 * value / calls:.0f}" for value in spent),
        ]

    message = {"clock": 1.5, "payload": bytes(size)}
    if kind == "aiohttp":
        body = json.dumps({"clock": 1.5, "payload": "A" * (size * 4 // 3)}).encode()
        headers = {"Authorization": "0" * 160, "Content-Type": "application/json"}
        async with aiohttp.ClientSession(auto_decompress=False) as session:

            async def ask() -> None:
                async with session.post(
                    f"http://127.0.0.1:{port}/echo", data=body, headers=headers
                ) as answer:
                    json.loads(await answer.read())

            return await timed(ask)
    client = PeerClient(options(directory), "a", lambda _: ("127.0.0.1", port))
    try:
        return await timed(lambda: client.call("b", "echo", message, 5.0))
    finally:
        await client.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--serve", nargs=2, metavar=("DIRECTORY", "KIND"))
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(Path(given.serve[0]), given.serve[1]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        secret(directory, "key", KEY)
        for kind in ("key", "aiohttp"):
            command = [sys.executable, "-m", "bench.bench_peer", "--serve", name, kind]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as process:
                assert process.stdout is not None
                port = int(process.stdout.readline())
                rows += [
                    asyncio.run(measure(directory, kind, process.pid, port, size, given.calls))
                    for size in SIZES
                ]
                assert process.stdin is not None
                process.stdin.close()
    print(
        table(
            ["authentication", "payload, bytes", "calls/s", "caller, µs CPU", "listener, µs CPU"],
            rows,
        )
    )


if __name__ == "__main__":
    main()
