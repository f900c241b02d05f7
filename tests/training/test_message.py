"""The layout of a heartbeat: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.training.message import MAX_COUNT, MAX_SIZE, SIZE, Memory, Message, Phase, decode, encode

COUNT = st.integers(0, MAX_COUNT)
SECONDS = st.floats(0, 1e12)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Draw a message as a training may send it."""
    timed, finite = draw(st.booleans()), draw(st.none() | st.booleans())
    return Message(
        step=draw(COUNT),
        sent=draw(SECONDS),
        phase=draw(st.sampled_from(Phase)),
        lost=draw(COUNT),
        last_seconds=draw(SECONDS) if timed else None,
        mean_seconds=draw(SECONDS) if timed else None,
        skipped=draw(st.none() | COUNT),
        loss_finite=finite,
        nonfinite=draw(COUNT),
        loss_scale=draw(st.none() | SECONDS),
        gradient_norm=draw(st.none() | st.floats(allow_nan=False)),
        memory=draw(st.none() | st.builds(Memory, COUNT, COUNT, COUNT)),
        communication_seconds=draw(st.none() | SECONDS),
    )


@given(messages())
def test_round_trip(message: Message) -> None:
    """Every value arrives as it was, and what is unknown arrives as unknown."""
    assert decode(encode(message)) == message


@given(messages(), st.binary(max_size=MAX_SIZE - SIZE), st.integers(1, 255))
def test_newer_senders_are_understood(message: Message, more: bytes, version: int) -> None:
    """A later version appends fields; an older agent reads those it knows."""
    data = bytearray(encode(message) + more)
    data[4] = version
    assert decode(bytes(data)) == message


@given(st.binary(max_size=2 * MAX_SIZE) | st.binary(min_size=SIZE, max_size=SIZE + 8).map(lambda tail: b"dshb\x01" + tail))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    """Garbage is either a message whose values can be shown, or ValueError."""
    with contextlib.suppress(ValueError):
        message = decode(data)
        assert 0 <= message.step <= MAX_COUNT
        assert 0 <= message.phase <= max(Phase)
        for value in (message.sent, message.last_seconds, message.mean_seconds, message.communication_seconds):
            assert value is None or 0 <= value < math.inf


@given(messages(), st.integers(0, SIZE - 1))
def test_cut_messages_are_refused(message: Message, length: int) -> None:
    """A message that is cut short is none."""
    with pytest.raises(ValueError, match="are no heartbeat"):
        decode(encode(message)[:length])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Message(step=MAX_COUNT + 1, sent=1.0), "a count is beyond"),
        (Message(step=1, sent=math.nan), "sent: nan"),
        (Message(step=1, sent=-1.0), "sent: -1"),
        (Message(step=1, sent=1.0, last_seconds=math.inf, mean_seconds=1.0), "step time: inf"),
        (Message(step=1, sent=1.0, communication_seconds=-1.0), "communication: -1"),
        (Message(step=1, sent=1.0, loss_scale=math.nan), "loss scale: nan"),
    ],
)
def test_impossible_values_are_refused(message: Message, why: str) -> None:
    """Values that no training has are no message; the error names them."""
    with pytest.raises(ValueError, match=why):
        decode(encode(message))


def test_norm_may_be_anything() -> None:
    """A gradient norm that is NaN is what the training has, and is told."""
    norm = decode(encode(Message(step=1, sent=1.0, gradient_norm=math.nan))).gradient_norm
    assert norm is not None
    assert math.isnan(norm)
