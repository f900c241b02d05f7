"""What has happened when the time is up counts: the agent itself may have been stopped meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
import select
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import pytest

from dshealthd.collection import worker_process
from dshealthd.collection.worker_process import WorkerProcess
from dshealthd.config.config import load
from dshealthd.core import background, child, timing, wire
from dshealthd.core.host import Host
from dshealthd.core.timing import happens, time_limit
from dshealthd.doctor import agents, status_document
from dshealthd.evidence.findings import HangCase
from dshealthd.evidence.options import EvidenceOptions
from dshealthd.evidence.service import Evidence
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.workers.fork_server import ForkServer, ForkServerError
from dshealthd.probe.workers.store import LocalStore
from tests.status_documents import document
from tests.suspension import Suspension, turns

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path
    from typing import Any

T = TypeVar("T")
SECONDS = 0.05
"""The deadline; the loop is stopped for longer."""


async def stopped_during(waiting: Coroutine[None, None, T], happening: threading.Event) -> T:
    """Return what a coroutine does while whose deadline the loop stops, and something happens."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)  # it waits now
    assert happening.wait(60.0)
    time.sleep(2 * SECONDS)  # as SIGSTOP, or a machine that is suspended, would
    return await task


def test_an_event_that_came_with_the_end_of_its_time_has_happened() -> None:
    """The loop finds both at once."""

    async def scene() -> None:
        event, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon(event.set)
            time.sleep(2 * SECONDS)

        loop.call_soon(stop)
        assert await happens(event, SECONDS)
        assert not await happens(asyncio.Event(), SECONDS)

    asyncio.run(scene())


def test_a_child_that_ended_while_the_agent_was_stopped_can_be_killed() -> None:
    """It is not taken for one that hangs in the kernel, which nothing would ever take back."""

    async def scene() -> None:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        started = child.spawn("a sleeper", command)
        ended = threading.Event()
        threading.Thread(target=_set_when_ended, args=(started.pid, ended)).start()
        assert await stopped_during(started.killed(SECONDS), ended)
        assert started.code is not None

    asyncio.run(scene())


def _set_when_ended(pid: int, ended: threading.Event) -> None:
    """Set `ended` when a process has ended, which is reaped already where the loop was quicker."""
    while not ended.wait(0.01):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "Z"
        if state == "Z":
            ended.set()


def test_a_call_that_returned_while_the_agent_was_stopped_has_returned() -> None:
    """A disk that answered is not said to hang; one that does not answer is."""

    async def scene() -> None:
        returned, never = threading.Event(), threading.Event()

        def look() -> int:
            returned.set()
            return 7

        call = background.call(look, "a disk", SECONDS)
        assert await stopped_during(call, returned) == 7
        with pytest.raises(TimeoutError):
            await background.call(lambda: never.wait(60.0), "a disk", SECONDS)
        never.set()

    asyncio.run(scene())


async def stopped_until_readable(
    waiting: Coroutine[None, None, T], descriptor: int, go: Path | None = None
) -> T:
    """Return what a coroutine does while whose deadline the loop stops, and an answer arrives.

    Who answers waits for `go` where it is not asked: the loop would have taken an answer that is
    there before.
    """
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)  # it waits now
    if go is not None:
        go.touch()
    assert select.select([descriptor], [], [], 60.0)[0]
    time.sleep(2 * SECONDS)
    return await task


def test_what_had_arrived_is_read_after_the_deadline() -> None:
    """Two reads are needed, of what came while the loop was stopped; what never comes is cut off."""

    async def scene() -> None:
        with child.channel("a test") as (ours, theirs):
            reader, writer = await child.streams(ours)

            async def read() -> bytes:
                async with time_limit(SECONDS):
                    return await reader.readexactly(2) + await reader.readexactly(3)

            theirs.sendall(b"hello")
            assert await stopped_until_readable(read(), ours.fileno()) == b"hello"
            with pytest.raises(TimeoutError):
                await read()
            writer.close()

    asyncio.run(scene())


def test_a_worker_that_was_ready_while_the_agent_was_stopped_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not ended as one that does not start; one that says nothing is."""
    monkeypatch.setattr(worker_process, "START_DEADLINE", SECONDS)
    frame = wire.pack({"ready": True})
    told = (
        "import os, select, signal, sys; channel = int(sys.argv[2]); "
        "select.select([channel], [], []); "  # the agent's greeting
        f"os.write(channel, {frame!r}); signal.pause()"
    )

    async def greeted(code: str, *, answers: bool) -> None:
        started = await worker_process.start("test", (sys.executable, "-S", "-c", code))
        worker = WorkerProcess("test", started, {}, {}, time.monotonic)
        channel = started[1]._transport.get_extra_info("socket").fileno()
        try:
            if answers:
                await stopped_until_readable(worker.greet({}), channel)
            else:
                await worker.greet({})
        finally:
            assert await started[0].killed(60.0)
            worker.let_go()

    asyncio.run(greeted(told, answers=True))
    with pytest.raises(worker_process.Broken, match="was not ready within"):
        asyncio.run(greeted("import signal; signal.pause()", answers=False))


FORKS = """
import json, os, signal, socket, sys, time
control = socket.socket(fileno=int(sys.argv[-1]))
while not os.path.exists(__file__ + ".ready"):
    time.sleep(0.01)
control.send(json.dumps({"ready": os.getpid(), "threads": 1}).encode())
number = json.loads(socket.recv_fds(control, 4096, 2)[0])["fork"]
pid = os.fork()
if not pid:
    signal.pause()
while not os.path.exists(__file__ + ".forked"):
    time.sleep(0.01)
answer = json.dumps({"forked": number, "pid": pid}).encode()
socket.send_fds(control, [answer], [os.pidfd_open(pid)])
signal.pause()
"""
"""A parent of workers that imports no torch and forks once."""


def test_a_fork_server_that_answered_while_the_agent_was_stopped_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its start nor a fork counts as failed; one that does not answer is killed."""
    monkeypatch.setattr("dshealthd.probe.workers.fork_server.FORK_DEADLINE", SECONDS)
    program = tmp_path / "program.py"
    program.write_text(FORKS, encoding="ascii")

    async def scene() -> None:
        server = ForkServer(sys.executable, str(program), {})
        channel = server._socket.fileno()
        try:
            await stopped_until_readable(
                server.ready(SECONDS), channel, tmp_path / "program.py.ready"
            )
            assert server.about["threads"] == 1
            worker = await stopped_until_readable(
                server.fork(0, 0), channel, tmp_path / "program.py.forked"
            )
            assert worker.state()
            worker.kill()
            with pytest.raises(ForkServerError, match="did not answer within"):
                await server.fork(0, 0)  # it reads no second request
        finally:
            server.kill()
            async with asyncio.timeout(60):
                await server.ended.wait()

    asyncio.run(scene())


class Peer:
    """A peer in a thread of its own: what it says does not wait for the loop."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.asked, self.go, self.answered = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        with self._listener.accept()[0] as connection:
            request = b""
            while not request.endswith(b"}"):
                request += connection.recv(65536)
            self.asked.set()
            assert self.go.wait(60.0)
            body = b'{"clock": 1.0, "payload": "cGluZw=="}'
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            self.answered.set()
            connection.recv(1)  # until the client closes

    def close(self) -> None:
        """Wait for its end."""
        self._thread.join()
        self._listener.close()


def test_a_peer_that_answered_while_the_agent_was_stopped_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not said to be hung; one that does not answer is."""

    async def call(peer: Peer, *, answers: bool) -> None:
        suspension = Suspension(monkeypatch)
        client = PeerClient(PeerOptions(), "a", lambda _name: ("127.0.0.1", peer.port))
        asking = client.call("b", "echo", {"clock": 1.0, "payload": b"ping"}, 600.0)
        try:
            answer = asyncio.ensure_future(asking)
            assert await asyncio.to_thread(peer.asked.wait, 60.0)
            if answers:
                peer.go.set()
                assert peer.answered.wait(60.0)
            else:
                monkeypatch.setattr(timing, "MOMENT", 0.0)
            suspension.resume(601.0)
            await answer
        finally:
            await client.close()
            peer.go.set()
            peer.close()

    asyncio.run(call(Peer(), answers=True))
    with pytest.raises(PeerError) as raised:
        asyncio.run(call(Peer(), answers=False))
    assert (raised.value.outcome, raised.value.reason) == (Outcome.HUNG, "no_answer")


def test_a_key_that_was_set_while_the_agent_was_stopped_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that waits for it gets it; one that waits for another key is told that time is up."""

    async def scene() -> None:
        suspension = Suspension(monkeypatch)
        store = LocalStore()
        getting = asyncio.ensure_future(store("get", "key", None, 600.0))
        await turns()
        setting = asyncio.ensure_future(store("set", "key", b"value", 600.0))
        suspension.resume(601.0)
        assert await getting == b"value"
        await setting
        monkeypatch.setattr(timing, "MOMENT", 0.0)
        waiting = asyncio.ensure_future(store("wait", "another", None, 600.0))
        await turns()
        suspension.resume(601.0)
        with pytest.raises(TimeoutError):
            await waiting

    asyncio.run(scene())


COLLECTS = """
import pathlib, sys, socket, struct, time
directory = pathlib.Path(sys.argv[1])
channel = socket.socket(fileno=int(sys.argv[2]))
channel.recv(4)
(directory / "asked").touch()
while not (directory / "go").exists():
    time.sleep(0.01)
answer = b'{"kept": {}, "outcome": "complete", "detail": ""}'
channel.sendall(struct.pack(">I", len(answer)) + answer)
(directory / "answered").touch()
while channel.recv(65536):
    pass
"""
"""A collecting process that answers when it is told to."""


def test_evidence_that_was_taken_while_the_agent_was_stopped_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not counted as killed at its deadline; what has not been taken by then is."""

    async def take(directory: Path, *, answers: bool) -> str:
        directory.mkdir()
        suspension = Suspension(monkeypatch)
        evidence = Evidence(
            EvidenceOptions(),
            directory,
            Host(),
            metrics=str,
            probes=lambda: None,
            monotonic=time.monotonic,
            wall=time.time,
            command=(sys.executable, "-S", "-c", COLLECTS, str(directory)),
        )
        taking = asyncio.ensure_future(evidence.take(HangCase(job="7", reason="waiting")))
        while not (directory / "asked").exists():
            await asyncio.sleep(0.01)
        if answers:
            (directory / "go").touch()
            while not (directory / "answered").exists():
                time.sleep(0.01)  # without a turn of the loop
        else:
            monkeypatch.setattr(timing, "MOMENT", 0.0)
        suspension.resume(evidence.options.deadline + 1.0)
        return (await taking).outcome

    assert asyncio.run(take(tmp_path / "one", answers=True)) == "complete"
    assert asyncio.run(take(tmp_path / "other", answers=False)) == "killed"


def test_a_status_document_that_came_while_the_agent_was_stopped_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node is not said to be silent; one whose agent sends no page is."""

    class Client:
        """Answers once it is let go."""

        def __init__(self) -> None:
            self.ready = asyncio.Event()

        async def call(self, *_: Any) -> dict[str, Any]:
            await self.ready.wait()
            await asyncio.sleep(0)  # as what has arrived takes a turn of the loop to be read
            data = gzip.compress(json.dumps(document(node="b")).encode())
            return {"data": data, "stamp": "1", "size": len(data)}

        async def close(self) -> None:
            """Nothing is open."""

    async def ask(*, answers: bool) -> dict[str, Any]:
        suspension = Suspension(monkeypatch)
        client = Client()
        monkeypatch.setattr(agents, "member_client", lambda *_: client)
        asking = asyncio.ensure_future(agents._ask(load(None), "a", "b"))
        await turns()
        if answers:
            client.ready.set()
        else:
            monkeypatch.setattr(timing, "MOMENT", 0.0)
        suspension.resume(agents.CALL_DEADLINE + 1.0)
        return await asking

    assert asyncio.run(ask(answers=True))["node"] == "b"
    with pytest.raises(TimeoutError):
        asyncio.run(ask(answers=False))


def test_a_collection_that_ended_while_the_command_was_stopped_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its sources have said is in the document, and they are not unknown."""
    collected: list[bool] = []

    class Collecting:
        """A scheduler that has collected everything when the time is up."""

        def __init__(self, *_: object) -> None:
            self._suspension = Suspension(monkeypatch)
            self._answered = asyncio.Event()

        def _resume(self) -> None:
            self._answered.set()
            self._suspension.resume(status_document.COLLECT_DEADLINE + 1.0)

        async def once(self, _config: object) -> None:
            """Collect."""
            asyncio.get_running_loop().call_soon(self._resume)
            await self._answered.wait()
            await asyncio.sleep(0)  # as what has arrived takes a turn of the loop to be read
            collected.append(True)

        def samples(self) -> tuple[()]:
            """There are none of its own."""
            return ()

        async def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(status_document, "Scheduler", Collecting)
    assert status_document.collect(load(None))["node"]
    assert collected == [True]
