"""The note of a checkpoint: what goes in comes out, beside the messages and never instead of
them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.training import message
from dshealthd.training.message import PAGE, ROOM, SLOT, Message, newest_message
from dshealthd.training.saved import SIZE, Saved, decode, encode

MAX_COUNT = 10**12


def page(note: bytes, *messages: Message) -> bytes:
    """Return a page as a heartbeat writes it."""
    data = bytearray(PAGE)
    for number, start in enumerate(range(0, PAGE, SLOT)):
        if number < len(messages):
            data[start : start + message.SIZE] = message.encode(messages[number])
        data[start + SLOT - ROOM : start + SLOT] = note[number * ROOM : (number + 1) * ROOM]
    return bytes(data)


@given(
    st.builds(
        Saved,
        directory=st.text(
            st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=100
        ).map("/".__add__),
        saves=st.integers(0, MAX_COUNT),
        optimizer_files=st.none() | st.integers(1, 1 << 20),
        is_node_local=st.booleans(),
        is_deepspeed=st.booleans(),
    )
)
def test_what_goes_in_comes_out(saved: Saved) -> None:
    """And the messages beside it are read as ever."""
    both = Message(7, 1.0), Message(8, 2.0)
    data = page(encode(saved), *both)
    assert decode(data) == saved
    assert newest_message(data) == both[1]


def test_a_page_without_a_note() -> None:
    """A heartbeat of an earlier release has none, which is no error."""
    assert decode(page(bytes(SIZE), Message(7, 1.0))) is None


def test_no_message_reaches_the_note() -> None:
    """The layout of messages may grow, up to the room of the note."""
    assert message.SIZE <= SLOT - ROOM


@pytest.mark.parametrize("position", [0, 6, 8, 20, 30])
def test_a_damaged_note_is_none(position: int) -> None:
    """A byte that is not as it was written, as while it is being written."""
    data = bytearray(encode(Saved("/checkpoints", 3, 8)))
    data[position] ^= 0x55
    with pytest.raises(ValueError, match=r"checksum|not a checkpoint note"):
        decode(page(bytes(data)))


def test_a_relative_directory_is_refused() -> None:
    """A sender says what it likes; what is no absolute path is no directory."""
    with pytest.raises(ValueError, match="not a checkpoint directory: 'runs'"):
        decode(page(encode(Saved("runs", 1))))


def test_a_directory_that_is_too_long() -> None:
    """It has no room, and is not cut off."""
    with pytest.raises(ValueError, match="too many for the path"):
        encode(Saved("/" + "x" * SIZE, 1))
