"""The service with its real server process, asked by genuine gRPC clients.

Verdicts, what is unknown, and what is done to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from dshealthd.config.config import Config
from dshealthd.core.collector import Metric
from dshealthd.nvrx.fitness import FailedCheck, Fitness, FitnessCheck
from dshealthd.nvrx.options import NvrxOptions
from dshealthd.nvrx.server import Verdicts, serve
from dshealthd.nvrx.service import UP, VERDICTS, HealthCheckService, ServerError
from tests import agents
from tests.nvrx.client import ask, call
from tests.processes import children, command
from tests.stopwatch import Stopwatch
from tests.waiting import until

FIT = Fitness((), ())
UNFIT = Fitness((FailedCheck(FitnessCheck.GPU_LOST, "gpu 3", "GPU-abc is lost to NVML"),), ())
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNKNOWN = Fitness((), ("gpu: not sampled yet",))


class Node:
    """A service in a loop of its own thread, and the verdict that the test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fitness = FIT
        self.asked = 0
        self.stall = threading.Event()
        self.stall.set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self.service = HealthCheckService(NvrxOptions(socket=path), self._judge, time.monotonic)

    def _judge(self) -> Fitness:
        self.asked += 1
        self.stall.wait(120)
        return self.fitness

    def start(self) -> None:
        """Serve."""
        self._thread.start()
        self.loop.call_soon_threadsafe(self.service.start)

    def serve(self) -> None:
        """Serve, and wait until clients can come."""
        self.start()
        self.wait_up(1)

    def wait_up(self, up: float) -> None:
        """Wait until it serves, or does not."""
        until(lambda: self.value(UP) == up)

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Return the value of a series."""
        return {
            sample.labels: sample.value
            for sample in self.service.samples()
            if sample.metric is metric
        }.get(labels)

    def server(self) -> int:
        """Return the pid of the server's process."""
        pids: list[int] = []
        for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread that has ended
                pids += map(int, file.read_text().split())
        (found,) = [
            pid
            for pid in pids
            if b"dshealthd.nvrx.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found

    def close(self) -> None:
        """End the service."""
        self.stall.set()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self.service.close(), self.loop).result(60)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        if not self.loop.is_closed():
            self.loop.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A service that does not run yet."""
    made = Node(tmp_path / "nvhcd.sock")
    yield made
    made.close()


def test_verdicts(node: Node) -> None:
    """NVRx is told what the agent knows at the moment: healthy, unhealthy with the part. And what
    is unknown is no answer.
    """
    node.serve()
    assert ask(node.path).response.success
    node.fitness = UNFIT  # the verdict before is kept for a second
    until(lambda: not (said := ask(node.path)).healthy and "gpu 3" in said.response.error)
    node.fitness = UNKNOWN
    until(lambda: ask(node.path).error)
    said = ask(node.path)
    assert said.status is grpc.StatusCode.UNAVAILABLE
    assert "gpu: not sampled yet" in str(said.error)
    assert said.healthy  # NVRx's own conclusion from an error
    verdicts = [node.value(VERDICTS, verdict) for verdict in ("healthy", "unhealthy", "unknown")]
    assert verdicts in ([1, 1, 1], [1, 1, 2])


def test_socket(node: Node) -> None:
    """The socket is open to every user, its process belongs to nobody where the agent is root, has
    512 files at most, and both go with the service.
    """
    node.serve()
    assert os.stat(node.path).st_mode & 0o777 == 0o666
    pid = node.server()
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
    assert re.search(r"Max open files +512 +512 ", limits)
    if os.geteuid() == 0:
        assert os.stat(f"/proc/{pid}").st_uid == 65534
    node.close()
    assert not node.path.exists()
    assert not Path(f"/proc/{pid}").exists()


async def test_follows_the_configuration(tmp_path: Path) -> None:
    """Without a socket it is off and has no series; one that cannot be made is failing, with why;
    and a configuration without it ends what was begun.
    """
    service = HealthCheckService(NvrxOptions(), lambda: pytest.fail("nobody asks"), time.monotonic)
    await service.apply(Config())
    assert (service.status(), list(service.samples())) == ({"state": "off"}, [])
    nowhere = NvrxOptions(socket=tmp_path / "none" / "nvhcd.sock")
    await service.apply(Config().with_section(nowhere))
    async with asyncio.timeout(60):
        while service.status()["state"] != "failing":
            await asyncio.sleep(0.05)
    assert str(nowhere.socket) in service.status()["detail"]
    assert [sample.value for sample in service.samples() if sample.metric is UP] == [0.0]
    await service.apply(Config())
    assert (service.status(), list(service.samples())) == ({"state": "off"}, [])
    await service.close()


def test_deadline(node: Node) -> None:
    """An agent that hangs costs the caller its own deadline and no more, and nobody is called
    unhealthy for it.
    """
    node.serve()
    node.stall.clear()
    watch = Stopwatch(os.getpid())
    said = ask(node.path, timeout=0.5)
    assert said.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert watch.seconds() < 2
    patient = ask(node.path)
    assert patient.status is grpc.StatusCode.UNAVAILABLE
    assert patient.healthy


def test_server_that_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is killed is started again, on the same path."""
    node.serve()
    before = node.server()
    again = asyncio.Event()
    monkeypatch.setattr(asyncio, "sleep", lambda _: again.wait())
    os.kill(before, signal.SIGKILL)
    node.wait_up(0)
    monkeypatch.undo()
    node.loop.call_soon_threadsafe(again.set)
    node.wait_up(1)
    assert node.server() != before
    assert ask(node.path).response.success


async def test_server_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again later and later, until one has served for longer than that takes."""
    lasts, waits, now = [0.0, 0.0, 60.0, 60.1, 0.0], list[float](), [0.0]

    async def serve() -> None:
        if len(waits) == len(lasts):
            raise asyncio.CancelledError
        now[0] += lasts[len(waits)]
        raise ServerError

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    service = HealthCheckService(NvrxOptions(), lambda: FIT, lambda: now[0])
    monkeypatch.setattr(service, "_serve", serve)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await service._run()
    assert waits == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_socket_left_behind(node: Node) -> None:
    """The socket of an agent that was killed is taken over."""
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(node.path))
    node.serve()
    assert ask(node.path).response.success


@pytest.mark.parametrize("what", ["file", "listener", "no directory"])
def test_place_taken(tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A path that holds something else, or where somebody listens, is left alone, and the log says
    so.
    """
    node = Node(tmp_path / ("there/nvhcd.sock" if what == "no directory" else "nvhcd.sock"))
    listener = socket.socket(socket.AF_UNIX)
    if what == "file":
        node.path.write_text("precious")
    elif what == "listener":
        listener.bind(str(node.path))
        listener.listen()
    try:
        node.start()
        until(lambda: str(node.path) in capfd.readouterr().err)
        assert node.value(UP) == 0
    finally:
        node.close()
        listener.close()
    if what == "file":
        assert node.path.read_text() == "precious"
    assert node.path.exists() == (what != "no directory")


def test_hundred_connections(node: Node) -> None:
    """A hundred channels that stay open are all answered, and cost the agent a verdict each second
    and no more.
    """
    node.serve()
    started = time.monotonic()
    channels = [
        grpc.insecure_channel(
            f"unix://{node.path}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        for _ in range(100)
    ]
    try:
        assert all(call(channel).response.success for channel in channels)
    finally:
        for channel in channels:
            channel.close()
    assert node.asked <= 1 + (time.monotonic() - started)


def test_many_calls_at_a_time(tmp_path: Path) -> None:
    """Sixty-four wait while the agent does not answer; more are refused."""
    answers = threading.Event()

    def query() -> dict[str, str]:
        answers.wait(120)
        return {"response": ""}

    server = serve(str(tmp_path / "s"), cast("Verdicts", SimpleNamespace(query=query)))
    with grpc.insecure_channel(f"unix://{tmp_path / 's'}") as channel:
        method: Any = channel.unary_unary("/nvhcd.HealthCheckService/RunHealthCheck")
        calls = [method.future(b"") for _ in range(70)]
        until(lambda: sum(call.done() for call in calls) >= 6)
        answers.set()
        codes = Counter(call.code() for call in calls)
    assert codes == {grpc.StatusCode.OK: 64, REFUSED: 6}
    server.stop(None)


def test_garbage(node: Node) -> None:
    """Bytes that are no HTTP/2, silent connections, and messages that are no request or too long
    keep nobody from being answered.
    """
    node.serve()
    silent = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    try:
        for number, connection in enumerate(silent):
            connection.settimeout(60)
            connection.connect(str(node.path))
            if number % 2:
                connection.sendall(os.urandom(500))
        with grpc.insecure_channel(f"unix://{node.path}") as channel:
            longest = b"\xff" * (1 << 16)
            assert call(channel, request=longest).response.success
            assert call(channel, request=longest + b"a").status is REFUSED
            unknown: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                "/nvhcd.HealthCheckService/Other"
            )
            with pytest.raises(grpc.RpcError) as raised:
                unknown(b"", timeout=60)
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert ask(node.path).response.success
    finally:
        for connection in silent:
            connection.close()
    assert node.value(UP) == 1


def test_too_many_connections(node: Node) -> None:
    """When somebody holds all the connections there are, others wait or fail, nobody is called
    unhealthy, and it works again afterwards.
    """
    node.serve()
    pid = node.server()
    held = []
    try:
        for _ in range(700):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            held.append(connection)
            try:
                connection.connect(str(node.path))
            except BlockingIOError:
                break
        assert ask(node.path, timeout=2).healthy
    finally:
        for connection in held:
            connection.close()
    until(lambda: (said := ask(node.path)).error is None and said.response.success)
    assert node.server() == pid


def test_server_ends_with_its_agent(tmp_path: Path) -> None:
    """A server whose agent was killed ends by itself."""
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "dshealthd.nvrx.server",
        str(tmp_path / "s"),
        str(theirs.fileno()),
    ]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as server:
        theirs.close()
        ours.settimeout(60)
        assert ours.recv(1) == b"!"
        ours.close()
        assert server.wait(60) == 0


def test_a_module_in_the_working_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by hand in a user's directory, the server imports nothing from there."""
    (tmp_path / "grpc.py").write_text("open('ran', 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    node = Node(tmp_path / "nvrx.sock")
    try:
        node.serve()
    finally:
        node.close()
    assert not (tmp_path / "ran").exists()


def test_off(tmp_path: Path) -> None:
    """Without the option nothing of it is loaded and no process of it runs."""
    with agents.running(tmp_path) as agent:
        scrape = agent.wait(
            lambda scrape: scrape.value("dshealthd_collector_up", collector="memory") == 1
        )
        assert "dshealthd_nvrx_up" not in scrape.series
        for pid in (agent.pid, *agent.workers()):
            with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
                assert "/grpc/" not in maps.read()
        for pid in children(agent.pid):
            assert "nvrx" not in " ".join(command(pid))
