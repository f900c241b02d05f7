"""The client of RAS against a server that replays or misbehaves, in a process of its own and on
127.0.0.1 and ::1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.jobs.ras import protocol
from dshealthd.jobs.ras.address import Endpoint
from dshealthd.jobs.ras.client import Query, send_queries
from dshealthd.jobs.ras.peer import holder
from dshealthd.jobs.ras.protocol import (
    MAY_BE_SENT,
    RasAnswer,
    Stranger,
    Unanswered,
)
from tests.jobs.ras.server import BEHAVIORS, Communicator, Process, Rank, document
from tests.stopwatch import Stopwatch
from tests.waiting import until

ATTEMPTS = 6

ANSWER = document(Communicator([Rank(0), Rank(1, pid=4001)]))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start servers, and end them after the test."""
    with contextlib.ExitStack() as stack:
        (tmp_path / "answer").write_bytes(ANSWER)

        def start(behavior: str, **where: object) -> Process:
            # handed through
            process = Process(behavior, tmp_path / "answer", **where)  # type: ignore[arg-type]
            stack.callback(process.close)
            return process

        yield start


def query(process: Process, address: str = "127.0.0.1") -> Query:
    """Return a question to a server that is vouched for."""
    return Query([Endpoint(address, process.port)], lambda _connection: True)


def slowly() -> float:
    """Return a time that gives a server that is well twenty times as long as it ships."""
    return time.monotonic() / 20


def outcome(asked: Query, seconds: float = 3, clock: Callable[[], float] = slowly) -> object:
    """Ask, and return what came of it."""
    send_queries([asked], seconds, clock)
    return asked.outcome


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_answer_in_json(serve: Callable[..., Process], address: str) -> None:
    """An NCCL that knows JSON is asked for it, and its answer comes whole."""
    assert outcome(query(serve("json", address=address), address)) == RasAnswer(ANSWER)


def test_text_is_no_substitute(serve: Callable[..., Process], tmp_path: Path) -> None:
    """Where JSON is refused, as 2.26.2 to 2.28.6 do, no status is asked: its text can crash."""
    result = outcome(query(serve("text", record=tmp_path / "record")))
    assert isinstance(result, Unanswered)
    assert "text is not requested" in result.detail
    said = (tmp_path / "record").read_bytes()
    assert said == b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\n"


def test_what_may_be_sent() -> None:
    """The closed list: questions, and no command that changes a job or keeps a connection."""
    assert sorted(MAY_BE_SENT) == [
        b"CLIENT PROTOCOL 2\n",
        b"SET FORMAT json\n",
        b"TIMEOUT 1\n",
        b"TIMEOUT 2\n",
        b"TIMEOUT 3\n",
        b"TIMEOUT 4\n",
        b"TIMEOUT 5\n",
        b"VERBOSE STATUS\n",
    ]


def test_nothing_else_is_sent(
    serve: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that a defect of the protocol's code would say does not leave the client."""
    monkeypatch.setattr(protocol, "STATUS", b"CONTROL abort\n")
    result = outcome(query(serve("json", record=tmp_path / "record")))
    assert isinstance(result, Unanswered)
    assert b"CONTROL" not in (tmp_path / "record").read_bytes()


@pytest.mark.parametrize(
    ("behavior", "reason", "said"),
    [
        ("stall", Reason.TIMEOUT, "no complete answer in time"),
        ("trickle", Reason.TIMEOUT, "no complete answer in time"),
        ("flood", Reason.MALFORMED, "longer than 16777216 bytes"),
        ("garbage", Reason.MALFORMED, "more than the expected line: b'SSH-2.0"),
        ("chatter", Reason.MALFORMED, "more than the expected line"),
        ("close", Reason.MALFORMED, "closed at greeting, without an answer"),
    ],
)
def test_misbehavior(
    serve: Callable[..., Process], behavior: str, reason: Reason, said: str
) -> None:
    """Each way not to answer ends within the time given, in a reason of its own."""
    process = serve(behavior)
    watch = Stopwatch(process.popen.pid)
    clock = watch.seconds if reason is Reason.TIMEOUT else slowly
    result = outcome(query(process), 1.5, clock)
    assert isinstance(result, Unanswered)
    assert result.reason is reason
    assert said in result.detail
    assert watch.seconds() < 3


def test_trickle_wakes_nobody(serve: Callable[..., Process]) -> None:
    """An answer that comes byte by byte does not wake the reader for each."""
    asked, looks = query(serve("trickle")), 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return time.monotonic()

    send_queries([asked], 1.5, clock)
    assert isinstance(asked.outcome, Unanswered)
    assert looks < 20


def test_second_address(serve: Callable[..., Process]) -> None:
    """Where localhost is two addresses, and NCCL has bound the second, it is found there."""
    process = serve("json", address="::1")
    endpoints = [Endpoint("127.0.0.1", process.port), Endpoint("::1", process.port)]
    assert isinstance(outcome(Query(endpoints, lambda _connection: True)), RasAnswer)


@pytest.mark.parametrize(("stopped", "answered"), [(5, True), (6, False)])
def test_attempts_as_shipped(
    serve: Callable[..., Process], stopped: int, *, answered: bool
) -> None:
    """Five connections in a row may meet stopped processes, and the sixth is answered."""
    process, alive = serve("json"), serve("json")
    os.kill(process.popen.pid, signal.SIGSTOP)
    endpoints = [Endpoint("127.0.0.1", process.port)] * stopped
    asked = Query([*endpoints, Endpoint("127.0.0.1", alive.port)], lambda _connection: True)
    now = 0.0

    def clock() -> float:
        """Let a greeting's time pass at each look, but not while the process that is well
        answers.
        """
        nonlocal now
        now += 1.0 if asked.connections <= stopped else 0.0
        return now

    send_queries([asked], 1e6, clock)
    assert asked.connections == ATTEMPTS == 6
    assert isinstance(asked.outcome, RasAnswer if answered else Unanswered), asked.outcome


def test_mute_process_alone(serve: Callable[..., Process]) -> None:
    """One that never greets is tried a bounded number of times, for a second each."""
    asked = query(serve("mute"))
    result = outcome(asked, 2.5, Stopwatch().seconds)
    assert isinstance(result, Unanswered)
    assert (result.reason, asked.connections) == (Reason.TIMEOUT, 3)


def test_stranger_is_not_asked(serve: Callable[..., Process], tmp_path: Path) -> None:
    """A process that is not vouched for hears no question: it receives the opening of each
    connection, which says nothing of the job, and not one byte more.

    After some tries to meet another there is no answer.
    """
    refused: list[int] = []

    def verify_peer(connection: socket.socket) -> bool:
        refused.append(connection.getpeername()[1])
        return False

    record = tmp_path / "record"
    process = serve("json", record=record)
    assert isinstance(outcome(Query([Endpoint("127.0.0.1", process.port)], verify_peer)), Stranger)
    assert refused == [process.port] * ATTEMPTS
    # Once it has answered one who came later, it has read all that came before.
    assert outcome(query(process)) == RasAnswer(ANSWER)
    later = [protocol.OPENING, b"TIMEOUT 1\n", protocol.JSON, protocol.STATUS]
    said = record.read_bytes().splitlines(keepends=True)
    assert sorted(said) == sorted([protocol.OPENING] * ATTEMPTS + later)


def test_unknown_peer_is_a_failure(serve: Callable[..., Process]) -> None:
    """Where the kernel does not tell who answers, nothing is asked."""

    def verify_peer(_connection: socket.socket) -> bool:
        raise PermissionError(1, "not permitted")

    result = outcome(Query([Endpoint("127.0.0.1", serve("json").port)], verify_peer))
    assert isinstance(result, Unanswered)
    assert result.reason is Reason.PERMISSION_DENIED


def test_holder_of_a_connection(serve: Callable[..., Process]) -> None:
    """Of processes that share a port, the one that accepted a connection is found, whatever else
    they have accepted.
    """
    process = serve("mute")
    pids = {process.popen.pid, serve("mute", port=process.port).popen.pid}
    held: set[int | None] = set()
    end = time.monotonic() + 60
    with contextlib.ExitStack() as stack:
        while held != pids:  # the kernel picks one for each connection
            assert time.monotonic() < end, "one was never picked"
            connection = socket.create_connection(("127.0.0.1", process.port))
            stack.enter_context(connection)
            found = until(partial(holder, connection, pids, Host()))
            assert holder(connection, pids - {found}, Host()) is None
            held.add(found)
        assert holder(connection, [2**22 + 1], Host()) is None


def test_descriptors_are_closed(serve: Callable[..., Process]) -> None:
    """However a query ends, no descriptor is left."""
    before = os.listdir("/proc/self/fd")
    processes = [serve(behavior) for behavior in BEHAVIORS]
    started = len(os.listdir("/proc/self/fd")) - len(before)
    send_queries([query(process) for process in processes], 1.2, time.monotonic)
    assert len(os.listdir("/proc/self/fd")) - len(before) == started
