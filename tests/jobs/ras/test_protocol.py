"""One line at a time: who says more than is expected speaks another protocol."""

from __future__ import annotations

import pytest

from dshealthd.jobs.ras.protocol import Conversation, Unanswered


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
