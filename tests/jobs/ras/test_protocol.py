"""One line at a time: who says more than is expected speaks another protocol."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core.collector import Reason
from dshealthd.jobs.ras import protocol
from dshealthd.jobs.ras.address import Endpoint
from dshealthd.jobs.ras.client import Query
from dshealthd.jobs.ras.protocol import Unanswered

OPENING, GREETING, OK = b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL 2\n", b"OK\n"
QUESTION = [OPENING, b"TIMEOUT 5\n", b"SET FORMAT json\n", b"VERBOSE STATUS\n"]


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
