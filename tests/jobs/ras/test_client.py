"""The client of RAS, first line by line, and then against a server that replays or misbehaves, in a
process of its own and on 127.0.0.1 and ::1.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.jobs.ras import protocol
from dshealthd.jobs.ras.address import Endpoint
from dshealthd.jobs.ras.client import Query, send_queries
from dshealthd.jobs.ras.protocol import MAY_BE_SENT, Stranger, Unanswered
from dshealthd.jobs.ras.question import holder
from tests.jobs.ras.server import BEHAVIORS, Communicator, Process, Rank, document
from tests.stopwatch import Stopwatch
from tests.waiting import until

ATTEMPTS = 6
POLL = select.poll
OPENING, GREETING, OK = b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL 2\n", b"OK\n"
QUESTION = [OPENING, b"TIMEOUT 5\n", b"SET FORMAT json\n", b"VERBOSE STATUS\n"]

ANSWER = document(Communicator([Rank(0), Rank(1, pid=4001)]))


class Wire:
    """A connection over which these pieces arrive, and then its end."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.said: list[bytes] = []
        self.send = self.said.append

    def connect(self, _address: object) -> None:
        """Connect at once."""

    def setsockopt(self, *_: object) -> None:
        """Set nothing."""

    def recv(self, _size: int) -> bytes:
        """Return what arrives next."""
        return self._pieces.pop(0) if self._pieces else b""


def talk(*pieces: bytes, seconds: float = 12.0) -> tuple[list[bytes], bytes | Unanswered]:
    """Return what is said where these pieces arrive, and what comes of it."""
    wire: Any = Wire(list(pieces))
    query = Query([], lambda _connection: True)
    run = query._converse(wire, Endpoint("127.0.0.1", 1), seconds, lambda: 0.0)
    try:
        while True:
            next(run)
    except StopIteration as end:
        return wire.said, end.value
    except Unanswered as failure:
        return wire.said, failure


@pytest.mark.parametrize(
    "pieces",
    [
        (GREETING,),
        (b"SERVER ", b"PROTOCOL 2", b"\n"),
        (b"server protocol 3\r\n",),
        (b"SERVER PROTOCOL ".ljust(1024, b"2"), b"\n"),
    ],
)
def test_the_greeting(pieces: tuple[bytes, ...]) -> None:
    """However it arrives."""
    assert talk(*pieces)[0] == QUESTION[:2]


@pytest.mark.parametrize(
    "data",
    [
        b"SERVER PROTOCOL 2\nmore",
        b"SERVER PROTOCOL 2\n\n",
        b"SERVER PROTOCOL ".ljust(1025, b"2") + b"\n",
        b"x" * 1025,
    ],
)
def test_more_than_a_line(data: bytes) -> None:
    """What follows it, and a line that does not end, are another protocol's."""
    said, outcome = talk(data)
    assert said == [OPENING]
    assert str(outcome).startswith("more than the expected line")


@pytest.mark.parametrize("told", [(), (GREETING,), (GREETING, OK, OK)])
def test_an_end_without_an_answer(told: tuple[bytes, ...]) -> None:
    """Wherever it comes."""
    said, outcome = talk(*told)
    assert said == QUESTION[: 1 + len(told)]
    assert str(outcome).endswith("without an answer")


@pytest.mark.parametrize(("seconds", "patience"), [(12, 5), (60, 5), (8.5, 2), (3, 1)])
def test_server_is_told_how_long(seconds: float, patience: int) -> None:
    """RAS is told to wait for its peers for so long that its answer comes in time, and no longer
    than NCCL would.
    """
    assert talk(GREETING, seconds=seconds)[0][1] == b"TIMEOUT %d\n" % patience


def test_reply_in_pieces() -> None:
    """Lines may come byte by byte, and in whatever case."""
    greeting = [bytes([byte]) for byte in b"server protocol 2\r\n"]
    assert talk(*greeting, b"ok\n", b"Ok\n", b"{...", b"}") == (QUESTION, b"{...}")


def test_text_is_no_substitute() -> None:
    """Where JSON is refused, as 2.26.2 to 2.28.6 do, no status is asked: its text can crash."""
    said, outcome = talk(GREETING, OK, b"ERROR: Unknown command SET FORMAT json\n")
    assert said == QUESTION[:3]
    assert "text is not requested" in str(outcome)


def test_nothing_else_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that a defect of the protocol's code would say does not leave the client."""
    monkeypatch.setattr(protocol, "STATUS", b"CONTROL abort\n")
    said, outcome = talk(GREETING, OK, OK)
    assert said == QUESTION[:3]
    assert isinstance(outcome, Unanswered)


def test_a_long_answer() -> None:
    """It is read to its limit, and no further: what RAS sends is held whole."""
    answer = b"x" * (16 << 20)
    assert talk(GREETING, OK, OK, answer)[1] == answer
    assert "longer than" in str(talk(GREETING, OK, OK, answer, b"x")[1])


@given(st.lists(st.binary(min_size=1) | st.sampled_from([GREETING, OK, b"ERROR: no\n"])))
def test_any_conversation(pieces: list[bytes]) -> None:
    """Whatever arrives, what is said is one of the known lines, or there is a named end."""
    said, outcome = talk(*pieces)
    assert said == QUESTION[: len(said)]
    if isinstance(outcome, Unanswered):
        assert outcome.reason is Reason.MALFORMED
    else:
        assert said == QUESTION
        assert outcome


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


def result_of(asked: Query, seconds: float = 3, clock: Callable[[], float] = slowly) -> object:
    """Ask, and return what came of it."""
    send_queries([asked], seconds, clock)
    return asked.outcome


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_answer_in_json(serve: Callable[..., Process], address: str) -> None:
    """An NCCL that knows JSON is asked for it, and its answer comes whole."""
    assert result_of(query(serve("json", address=address), address)) == ANSWER


def test_what_may_be_sent() -> None:
    """The closed list: questions, and no command that changes a job or keeps a connection."""
    questions = {b"CLIENT PROTOCOL 2\n", b"SET FORMAT json\n", b"VERBOSE STATUS\n"}
    assert questions | {b"TIMEOUT %d\n" % seconds for seconds in range(1, 6)} == MAY_BE_SENT


@pytest.mark.parametrize(
    ("behavior", "reason", "said"),
    [
        ("stall", Reason.TIMEOUT, "no complete answer in time"),
        ("flood", Reason.MALFORMED, "longer than 16777216 bytes"),
    ],
)
def test_misbehavior(
    serve: Callable[..., Process], behavior: str, reason: Reason, said: str
) -> None:
    """Each way not to answer ends within the time given, in a reason of its own."""
    process = serve(behavior)
    watch = Stopwatch(process.popen.pid)
    clock = watch.seconds if reason is Reason.TIMEOUT else slowly
    result = result_of(query(process), 1.5, clock)
    assert isinstance(result, Unanswered)
    assert (result.reason, said in result.detail) == (reason, True)
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
    assert isinstance(result_of(Query(endpoints, lambda _connection: True)), bytes)


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
    assert isinstance(asked.outcome, bytes if answered else Unanswered), asked.outcome


class Poll:
    """A poll(2) of one connection, whose waits for an answer that does not come take no time: they
    move a clock.
    """

    now = 0.0
    """Seconds."""

    def __init__(self) -> None:
        self._poll = POLL()
        self._events = 0

    def register(self, connection: socket.socket, events: int) -> None:
        """Wait for these events of a connection."""
        self._poll.register(connection, events)
        self._events = events

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        """Wait until it is connected, as long as that takes; an answer is there or not."""
        ready = self._poll.poll(0 if self._events == select.POLLIN else None)
        if not ready:
            Poll.now += milliseconds / 1000.0
        return ready


def test_mute_process_alone(serve: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never greets is tried a bounded number of times, for a second each."""
    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(Poll, "now", 0.0)
    asked = query(serve("mute"))
    result = result_of(asked, 2.5, lambda: Poll.now)
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
    assert isinstance(
        result_of(Query([Endpoint("127.0.0.1", process.port)], verify_peer)), Stranger
    )
    assert refused == [process.port] * ATTEMPTS
    # Once it has answered one who came later, it has read all that came before.
    assert result_of(query(process)) == ANSWER
    later = [protocol.OPENING, b"TIMEOUT 1\n", protocol.JSON, protocol.STATUS]
    said = record.read_bytes().splitlines(keepends=True)
    assert sorted(said) == sorted([protocol.OPENING] * ATTEMPTS + later)


def test_unknown_peer_is_a_failure(serve: Callable[..., Process]) -> None:
    """Where the kernel does not tell who answers, nothing is asked."""

    def verify_peer(_connection: socket.socket) -> bool:
        raise PermissionError(1, "not permitted")

    result = result_of(Query([Endpoint("127.0.0.1", serve("json").port)], verify_peer))
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
    gc.collect()  # descriptors that other tests of this process have left
    before = os.listdir("/proc/self/fd")
    processes = [serve(behavior) for behavior in BEHAVIORS]
    started = len(os.listdir("/proc/self/fd")) - len(before)
    send_queries([query(process) for process in processes], 1.2, time.monotonic)
    assert len(os.listdir("/proc/self/fd")) - len(before) == started
