"""One line at a time: who says more than is expected speaks another protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core.collector import Reason
from dshealthd.jobs.ras.protocol import Conversation, Unanswered

GREETING, OK = b"SERVER PROTOCOL 2\n", b"OK\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"SERVER PROTOCOL 2\n",),
        (b"SERVER ", b"PROTOCOL 2", b"\n"),
        (b"server protocol 3\r\n",),
        (b"SERVER PROTOCOL ".ljust(1024, b"2"), b"\n"),
    ],
)
def test_the_greeting(pieces: tuple[bytes, ...]) -> None:
    """However it arrives."""
    conversation = Conversation()
    said = [conversation.receive(piece, 5.0) for piece in pieces]
    assert [bool(text) for text in said] == [False] * (len(pieces) - 1) + [True]
    assert conversation.greeted


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
    with pytest.raises(Unanswered, match="more than the expected line"):
        Conversation().receive(data, 5.0)


@pytest.mark.parametrize("said", [(), (GREETING,), (GREETING, OK, OK)])
def test_an_end_without_an_answer(said: tuple[bytes, ...]) -> None:
    """Wherever it comes."""
    conversation = Conversation()
    for line in said:
        conversation.receive(line, 12)
    with pytest.raises(Unanswered, match="without an answer"):
        conversation.end()


@pytest.mark.parametrize(("seconds", "patience"), [(12, 5), (60, 5), (8.5, 2), (3, 1)])
def test_server_is_told_how_long(seconds: float, patience: int) -> None:
    """RAS is told to wait for its peers for so long that its answer comes in time, and no longer
    than NCCL would.
    """
    assert Conversation().receive(b"SERVER PROTOCOL 2\n", seconds) == b"TIMEOUT %d\n" % patience


def test_reply_in_pieces() -> None:
    """Lines may come byte by byte, and in whatever case."""
    conversation = Conversation()
    assert [conversation.receive(bytes([byte]), 12) for byte in b"server protocol 2\r\n"][
        -1
    ] == b"TIMEOUT 5\n"
    assert [conversation.receive(line, 12) for line in (b"ok\n", b"Ok\n")] == [
        b"SET FORMAT json\n",
        b"VERBOSE STATUS\n",
    ]
    assert conversation.receive(b"{...", 12) == b""
    assert conversation.end() == b"{..."


def test_a_long_answer() -> None:
    """It is read to its limit, and no further: what RAS sends is held whole."""
    conversation = Conversation()
    for line in (GREETING, OK, OK):
        conversation.receive(line, 12)
    assert conversation.receive(b"x" * (16 << 20), 12) == b""
    with pytest.raises(Unanswered, match="longer than"):
        conversation.receive(b"x", 12)


@given(
    st.lists(
        st.binary(min_size=1) | st.sampled_from([b"SERVER PROTOCOL 2\n", b"OK\n", b"ERROR: no\n"])
    )
)
def test_any_conversation(pieces: list[bytes]) -> None:
    """Whatever arrives, what is said is one of the known lines, or there is a named end."""
    conversation = Conversation()
    try:
        said = [conversation.receive(piece, 12) for piece in pieces]
        answer = conversation.end()
    except Unanswered as failure:
        assert failure.reason is Reason.MALFORMED  # noqa: PT017 - it may be an answer, too
    else:
        assert {*said} == {b"TIMEOUT 5\n", b"SET FORMAT json\n", b"VERBOSE STATUS\n", b""}
        assert answer
