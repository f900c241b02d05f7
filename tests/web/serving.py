"""A real server over a snapshot of made-up samples, in a thread or in a process of its own, and raw
clients for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from blockbuster import BlockBuster

from dshealthd.config.config import Web
from dshealthd.core.collector import Fault, Reason, gauge
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed, not_available
from dshealthd.core.self_metrics import SelfMetrics
from dshealthd.core.snapshot import Snapshot
from dshealthd.findings.judgement import judge, series_of, unready
from dshealthd.findings.overview import overview
from dshealthd.findings.record import NodeRecord
from dshealthd.findings.trends import Trends
from dshealthd.web.server import Server
from tests.jobs.standstills import standstills
from tests.stopwatch import Stopwatch

VALUE = gauge("dshealthd_value", "A value.", "part")


def small_snapshot() -> Snapshot:
    """Return a snapshot with one collector of each outcome."""
    snapshot = Snapshot(time.monotonic, time.time)
    snapshot.expect("good", 3600.0)
    faults = (Fault("part-2", Reason.TIMEOUT, "no answer within 2 s"),)
    snapshot.put(
        "good",
        CollectionResult(
            CollectionOutcome.OK,
            (VALUE(54.5, "part-1"), VALUE(float("nan"), "part-3")),
            faults,
            duration=0.25,
        ),
    )
    snapshot.expect("bad", 3600.0)
    snapshot.put("bad", failed(Reason.IO_ERROR, "cannot be read: \udcff Input/output error"))
    snapshot.expect("absent", 3600.0)
    snapshot.put("absent", not_available("no such device on this machine"))
    return snapshot


def sections(snapshot: Snapshot) -> dict[str, Any]:
    """Return the parts of the status document that an agent makes of a snapshot."""
    samples = (sample for latest in snapshot for sample in snapshot.samples(latest))
    series = series_of(snapshot, (), standstills=standstills(samples, time.time()))
    verdict = judge(
        snapshot, series, node="n1", name="n1", monotonic=time.monotonic(), wall=time.time()
    )
    return {**verdict.document(), "jobs": overview(series, "/state/evidence", wall=time.time())}


def large_snapshot(series: int) -> Snapshot:
    """Return a snapshot with so many series."""
    snapshot = Snapshot(time.monotonic, time.time)
    snapshot.expect("good", 3600.0)
    snapshot.put(
        "good",
        CollectionResult(
            CollectionOutcome.OK,
            tuple(VALUE(float(number), f"part-{number:06}" * 4) for number in range(series)),
        ),
    )
    return snapshot


class Served:
    """A running server and its port."""

    def __init__(
        self, port: int, server: Server | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """The server listens on `port` of 127.0.0.1; `tls` is for clients, where it speaks TLS."""
        self.port = port
        self.server = server
        self.tls = tls

    def connect(self, source: str = "127.0.0.1", timeout: float = 60.0) -> socket.socket:
        """Open a connection from an address of the loopback range."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout, (source, 0))
        return (
            connection
            if self.tls is None
            else self.tls.wrap_socket(connection, server_hostname="localhost")
        )

    def ask(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        method: str = "GET",
        source: str = "127.0.0.1",
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the answer to one request, and its body."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as client:
            client.sock = self.connect(source)
            client.request(method, path, headers=dict(headers or {}))
            answer = client.getresponse()
            return answer, answer.read()

    def send(self, data: bytes, source: str = "127.0.0.1") -> bytes:
        """Send bytes and return all that comes back until the server closes, as it must."""
        with self.connect(source) as connection:
            connection.sendall(data)
            return received(connection, 60.0)

    def metric(self, name: str, *labels: str) -> float:
        """Return what the server says of itself at this moment: one series, by its label values."""
        assert self.server is not None
        return next(
            (
                sample.value
                for sample in self.server.samples()
                if (sample.metric.name, sample.labels) == (name, labels)
            ),
            0.0,
        )


def received(connection: socket.socket, patience: float) -> bytes:
    """Return what comes until the other side closes or resets, or says nothing for `patience`
    seconds.
    """
    connection.settimeout(patience)
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


def answered(connection: socket.socket) -> int:
    """Take one answer off a connection that stays open, and return its status."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def closed_after(connection: socket.socket, limit: float = 60.0) -> float:
    """Return how many seconds it takes until the other side, a thread of this process, closes. Less
    what other work took. Fails when it does not within `limit`.
    """
    watch = Stopwatch(os.getpid())
    connection.settimeout(limit)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError as error:
        raise AssertionError(f"still open after {limit:g} s") from error
    return watch.seconds()


def options(**given: Any) -> Web:
    """Return options for a server on a free port of 127.0.0.1; times in seconds."""
    given = {
        name: Duration(value) if name.endswith("_timeout") else value
        for name, value in given.items()
    }
    return Web(listen_address="127.0.0.1:0", **given)


@contextlib.contextmanager
def serving(
    snapshot: Snapshot | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
    guarded: bool = True,
    targets: Callable[[], bytes | Awaitable[bytes]] | None = None,
    history: Callable[[], bytes] = lambda: NodeRecord(None).document("n1", (), time.time()),
    trends: Callable[[], bytes] = lambda: Trends().document("n1", time.time(), ()),
    **given: Any,
) -> Iterator[Served]:
    """Run a server in a thread; a blocking call in its event loop is an error of that request.

    `more` replaces parts of its status document. Not `guarded` beside playwright, whose own loop
    the guard would watch too.
    """
    held = snapshot or small_snapshot()
    server = Server(
        options(**given),
        held,
        lambda: server.samples(),  # noqa: PLW0108 - it is not bound yet
        lambda: (socket.gethostname(), ""),
        SelfMetrics(time.time()),
        lambda: unready(held),
        lambda _left_out: {**sections(held), **more},
        {
            "/api/v1/history": history,
            "/api/v1/trends": trends,
            **({} if targets is None else {"/api/v1/targets": targets}),
        },
    )
    loop = asyncio.new_event_loop()
    started, stop, problems = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        try:
            await server.start()
            started.set()
            await stop.wait()
        finally:
            await server.close()

    def run() -> None:
        guard = BlockBuster()
        guard.functions["os.listdir"].can_block_in(
            "http/connection_limiter.py", "keep_descriptors"
        )  # once, before anything is served
        if guarded:
            guard.activate()
        try:
            loop.run_until_complete(serve())
        except BaseException as error:  # handed to the test's own thread
            problems.append(error)
            raise
        finally:
            if guarded:
                guard.deactivate()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(60)
        if problems:
            raise problems[0]
        yield Served(server._listener.port, server, tls)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[tuple[Served, int]]:
    """Run this module as a process; gives the server and its pid."""
    command = [sys.executable, "-m", __name__, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            yield Served(int(process.stdout.readline())), process.pid
        finally:
            process.stdin.close()
            errors = process.stderr.read()
            assert process.wait(60) == 0, errors
            assert "Traceback" not in errors, errors


async def _serve_until_closed(server: Server, snapshot: Snapshot) -> None:
    """Serve until standard input ends; every 0.2 s there is a new sample."""
    await server.start()
    print(server._listener.port, flush=True)
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), closed.set)
    while not closed.is_set():
        for latest in list(snapshot):
            if latest.sampled is not None:
                snapshot.put(latest.name, latest.result)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closed.wait(), 0.2)
    await server.close()


def main() -> None:
    """Serve a few samples until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int)
    given = parser.parse_args()
    if given.files:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (given.files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    snapshot = large_snapshot(600)
    telemetry = SelfMetrics(time.time())
    server = Server(
        options(),
        snapshot,
        lambda: (*telemetry.samples(), *server.samples()),
        lambda: (socket.gethostname(), ""),
        telemetry,
        lambda: unready(snapshot),
        lambda _left_out: sections(snapshot),
    )
    asyncio.run(_serve_until_closed(server, snapshot))


if __name__ == "__main__":
    main()
