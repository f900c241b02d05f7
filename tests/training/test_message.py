"""The layout of a heartbeat: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from binascii import crc32
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.training.message import (
    PAGE,
    SIZE,
    SLOT,
    DeviceMemory,
    Message,
    OlderLayout,
    Phase,
    Totals,
    WaitSource,
    decode,
    encode,
    newest_message,
)

INSTANT = 1e-9
LONGEST_STEP = 1e7
MAX_COUNT = 10**12
MAX_FLOAT32 = 3.5e38
MAX_MEMORY = 1 << 50
MAX_PASSES = (1 << 16) - 1
MAX_TOTAL = 1e10
SHORTEST_STEP = 1e-6

COUNT = st.integers(0, MAX_COUNT)
BYTES = st.integers(0, MAX_MEMORY)
STEP_SECONDS = st.floats(SHORTEST_STEP, LONGEST_STEP)
PART_SECONDS = st.just(0.0) | st.floats(INSTANT, LONGEST_STEP)
TOTAL_SECONDS = st.floats(0, MAX_TOTAL)
HALF_A_TOTAL = st.floats(0, MAX_TOTAL / 2)
FLOAT32 = st.floats(0, MAX_FLOAT32)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Draw a message as a training may send it."""
    timed, own = draw(st.booleans()), draw(st.booleans())
    return Message(
        step=draw(COUNT),
        sent=draw(TOTAL_SECONDS),
        phase=draw(st.sampled_from(Phase)),
        last_seconds=draw(STEP_SECONDS) if timed else None,
        mean_seconds=draw(STEP_SECONDS) if timed else None,
        input_seconds=draw(st.none() | PART_SECONDS),
        skipped=draw(st.none() | COUNT),
        loss_finite=draw(st.none() | st.booleans()),
        finite_step=draw(COUNT),
        nonfinite_step=draw(COUNT),
        loss_scale=draw(st.none() | FLOAT32),
        gradient_norm=draw(st.none() | FLOAT32 | st.sampled_from((math.inf, -math.inf))),
        memory=draw(st.none() | st.builds(DeviceMemory, BYTES, BYTES, BYTES)),
        communication_seconds=draw(st.none() | TOTAL_SECONDS),
        wait_seconds=draw(PART_SECONDS) if own else None,
        work_seconds=draw(PART_SECONDS) if own else None,
        wait_source=draw(st.sampled_from(WaitSource)) if own else WaitSource.HOST,
        pipeline_stage=draw(st.none() | st.integers(0, (1 << 16) - 1)),
        forward_passes=draw(st.integers(0, MAX_PASSES)),
        totals=draw(st.none() | st.builds(Totals, COUNT, COUNT, HALF_A_TOTAL, HALF_A_TOTAL)),
        evaluation_seconds=draw(st.none() | TOTAL_SECONDS),
    )


@given(messages())
def test_round_trip(message: Message) -> None:
    """Every value arrives as it was, and what is unknown arrives as unknown."""
    assert decode(encode(message)) == message


def sealed(data: bytes, version: int = 5) -> bytes:
    """Return what a sender makes of the bytes behind the header, whatever they say."""
    return struct.pack("<4sBxHI", b"dshb", version, 12 + len(data), crc32(data)) + data


@given(messages(), st.binary(max_size=SLOT - SIZE), st.integers(5, 255))
def test_newer_senders_are_understood(message: Message, more: bytes, version: int) -> None:
    """A later version appends fields; an older agent reads those it knows."""
    assert decode(sealed(encode(message)[12:] + more, version)) == message


@pytest.mark.parametrize("version", [1, 4])
def test_older_senders_are_not_read(version: int) -> None:
    """Their fields stood elsewhere: what they say would be another step, phase or figure."""
    message = encode(Message(step=5, sent=1_000_000_000))
    older = sealed(message[12:] + bytes(8), version)
    with pytest.raises(OlderLayout, match="not a heartbeat"):
        decode(older)
    with pytest.raises(OlderLayout, match=f"but of {version}"):
        newest_message(older.ljust(PAGE, b"\0"))
    with pytest.raises(ValueError, match="not a heartbeat: it begins") as torn:
        decode(older[:-1] + b"\1")
    assert type(torn.value) is ValueError


@given(st.binary(max_size=PAGE) | st.binary(min_size=SIZE - 12, max_size=SIZE).map(sealed))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    """Garbage is either a message whose values can be shown, or ValueError."""
    with contextlib.suppress(ValueError):
        message = decode(data)
        assert 0 <= message.step <= MAX_COUNT
        assert 0 <= message.phase <= max(Phase)
        timings = (getattr(message, field) for field in Message._fields if "seconds" in field)
        sums = message.totals[2:] if message.totals else ()
        for value in (message.sent, *timings, *sums):
            assert value is None or 0 <= value < math.inf


@given(messages(), st.integers(0, SIZE - 1), st.integers(1, 255))
def test_damaged_messages_are_refused(message: Message, place: int, change: int) -> None:
    """A message of which a byte is another is none, but for a later version and an unused byte."""
    data = bytearray(encode(message))
    data[place] ^= change
    if place in {4, 5}:
        return
    with pytest.raises(ValueError, match=r"not a heartbeat|checksum|too few"):
        decode(bytes(data))


@given(messages(), messages())
def test_later_message_of_a_page(first: Message, second: Message) -> None:
    """Of the two messages of a page the one that was written later is read, or the only one."""
    page = encode(first).ljust(SLOT, b"\0") + encode(second).ljust(SLOT, b"\0")
    assert newest_message(page).sent == max(first.sent, second.sent)
    assert newest_message(page[:SLOT].ljust(PAGE, b"\0")) == first
    assert newest_message(b"\0" * SLOT + page[SLOT:]) == second
    with pytest.raises(ValueError, match="not a heartbeat"):
        newest_message(b"\0" * PAGE)


@given(messages(), st.integers(0, SIZE - 1))
def test_cut_messages_are_refused(message: Message, length: int) -> None:
    """A message that is cut short is none."""
    with pytest.raises(ValueError, match="too few for a heartbeat"):
        decode(encode(message)[:length])


@pytest.mark.parametrize(("message", "why"), [
    (Message(step=MAX_COUNT + 1, sent=1.0), "a count exceeds"),
    (Message(step=1, sent=math.nan), "sent: nan"),
    (Message(step=1, sent=-1.0), "sent: -1"),
    (Message(step=1, sent=1.0, skipped=MAX_COUNT + 1), "a count exceeds"),
    (Message(step=1, sent=1.0, finite_step=MAX_COUNT + 1), "a count exceeds"),
    (Message(step=1, sent=1.0, nonfinite_step=MAX_COUNT + 1), "a count exceeds"),
    (Message(step=1, sent=math.nextafter(MAX_TOTAL, math.inf)), "none since a boot"),
    (Message(step=1, sent=1.0, last_seconds=math.inf, mean_seconds=1.0), "step time: inf"),
    (Message(step=1, sent=1.0, communication_seconds=-1.0), "communication: -1"),
    (Message(step=1, sent=1.0, input_seconds=math.nan), "input: nan"),
    (Message(step=1, sent=1.0, loss_scale=math.nan), "loss scale nan"),
    (Message(step=1, sent=1.0, totals=Totals(1, 1, math.nan, 0.0)), "work so far: nan"),
    (Message(step=1, sent=1.0, evaluation_seconds=-1.0), "evaluation so far: -1"),
])  # fmt: skip
def test_impossible_values_are_refused(message: Message, why: str) -> None:
    """Values that no training has are no message; the error names them."""
    with pytest.raises(ValueError, match=why):
        decode(encode(message))


def beyond(value: float) -> float:
    """Return the next number above one."""
    return math.nextafter(value, math.inf)


BELOW = math.nextafter(SHORTEST_STEP, 0.0)
STEP = ("last_seconds", "mean_seconds")
OWN = ("wait_seconds", "work_seconds")


@pytest.mark.parametrize(
    ("names", "right", "wrong"),
    [
        (STEP, (SHORTEST_STEP, 1.0), (BELOW, 1.0)),
        (STEP, (1.0, SHORTEST_STEP), (1.0, BELOW)),
        (STEP, (LONGEST_STEP, 1.0), (beyond(LONGEST_STEP), 1.0)),
        (STEP, (1.0, LONGEST_STEP), (1.0, beyond(LONGEST_STEP))),
        (STEP, (SHORTEST_STEP, LONGEST_STEP), (5e-324, 1e308)),
        (OWN, (LONGEST_STEP, 1.0), (beyond(LONGEST_STEP), 1.0)),
        (OWN, (1.0, LONGEST_STEP), (1.0, beyond(LONGEST_STEP))),
        (("input_seconds",), (LONGEST_STEP,), (beyond(LONGEST_STEP),)),
        (("communication_seconds",), (MAX_TOTAL,), (beyond(MAX_TOTAL),)),
        (("evaluation_seconds",), (MAX_TOTAL,), (beyond(MAX_TOTAL),)),
        (("totals",), (Totals(1, MAX_COUNT, 1.0, 1.0),), (Totals(1, MAX_COUNT + 1, 1.0, 1.0),)),
        (("totals",), (Totals(1, 1, MAX_TOTAL, 0.0),), (Totals(1, 1, beyond(MAX_TOTAL), 0.0),)),
        (("totals",), (Totals(1, 1, 0.0, MAX_TOTAL),), (Totals(1, 1, 1.0, MAX_TOTAL),)),
        (("loss_scale",), (0.0,), (math.inf,)),
        (("loss_scale",), (MAX_FLOAT32,), (beyond(MAX_FLOAT32),)),
        (("gradient_norm",), (MAX_FLOAT32,), (beyond(MAX_FLOAT32),)),
        (("gradient_norm",), (math.inf,), (-5e-324,)),
        *(
            (("memory",), (DeviceMemory(*right),), (DeviceMemory(*wrong),))
            for right, wrong in zip(
                set(itertools.permutations((MAX_MEMORY, 0, 0))),
                set(itertools.permutations((MAX_MEMORY + 1, 0, 0))),
                strict=True,
            )
        ),
    ],
)
def test_figures_that_no_training_has_are_unknown(
    names: tuple[str, ...], right: tuple[object, ...], wrong: tuple[object, ...]
) -> None:
    """The message counts without them, as its rank may be hung all the same; the last figure within
    the bounds is known.
    """
    told: dict[str, Any] = dict.fromkeys((*STEP, *OWN), 1.0) | {"step": 1, "sent": 1.0}
    unknown: dict[str, Any] = dict.fromkeys(names)
    for values in (right, wrong):
        message = Message(**{**told, **dict(zip(names, values, strict=True))})
        expected = message if values is right else message._replace(**unknown)
        assert decode(encode(message)) == expected


@pytest.mark.parametrize("name", ["input_seconds", *OWN])
def test_less_than_the_clock_shows_is_no_time(name: str) -> None:
    """What is left of a subtraction is divided by nowhere."""
    for seconds, told in ((INSTANT, INSTANT), (math.nextafter(INSTANT, 0.0), 0.0), (5e-324, 0.0)):
        message = Message(step=1, sent=1.0, wait_seconds=1.0, work_seconds=1.0)
        odd = message._replace(**{name: seconds})  # type: ignore[arg-type] # a field by name
        assert getattr(decode(encode(odd)), name) == told


def test_norm_may_be_anything() -> None:
    """A gradient norm that is NaN is what the training has, and is told."""
    norm = decode(encode(Message(step=1, sent=1.0, gradient_norm=math.nan))).gradient_norm
    assert norm is not None
    assert math.isnan(norm)
