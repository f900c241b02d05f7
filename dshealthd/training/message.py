"""The message of a heartbeat, as bytes: what a training process tells the agent.

One message of a fixed layout, little-endian, in a page that both map or read.

The layout grows at its end only, and the version with it: an agent reads the fields it knows of a
newer message. Everything but the step itself may be unknown, which a bit says, so that an unknown
is never 0. What counts only grows, so that what is overwritten unread loses nothing.

The page holds two messages, which are written in turn: a process that is stopped while it writes
one leaves the other whole. Each has a checksum, by which a message that is read while it is written
is told from one that is whole, on processors that reorder stores too.
"""

from __future__ import annotations

import enum
import math
import struct
from binascii import crc32
from typing import NamedTuple

MAGIC = b"dshb"
VERSION = 1
HELLO = MAGIC + bytes([VERSION])
"""What a process says as it hands over its page."""
SLOT = 512
"""Bytes from one message of a page to the next."""
ROOM = 256
"""Bytes at the end of each slot that no message of any version uses: they hold the note of
`dshealthd.training.saved`.
"""
PAGE = 2 * SLOT
MAX_COUNT = 1 << 53
"""What a float64 holds exactly; no training counts further."""

_HEADER = struct.Struct("<4sBxHI")
"""Magic, version, length, and the checksum of all behind it."""
_BODY = struct.Struct("<BBxxIQQQddddddddQQQ")
SIZE = _HEADER.size + _BODY.size


class Phase(enum.IntEnum):
    """What the process is busy with; all but training are pauses in which no step is to be
    expected.
    """

    TRAINING = 0
    EVALUATION = 1
    CHECKPOINT = 2
    COMPILE = 3
    OTHER = 4


class StepStage(enum.IntEnum):
    """How far a step has come on the host, whose device may be behind."""

    UNKNOWN = 0
    INPUT = 1
    """The last step, or micro-step, has ended, and the next forward pass has not begun."""
    FORWARD = 2
    BACKWARD = 3
    """The forward pass has ended; gradients, collectives, optimizer."""


class _Known(enum.IntFlag):
    STEP_SECONDS = 1
    SKIPPED = 2
    LOSS = 4
    LOSS_FINITE = 8
    LOSS_SCALE = 16
    GRADIENT_NORM = 32
    MEMORY = 64
    COMMUNICATION = 128
    INPUT = 256
    FORWARD = 512


# Plain numbers: the arithmetic of IntFlag would cost more than the rest of a message.
(
    _STEP_SECONDS,
    _SKIPPED,
    _LOSS,
    _LOSS_FINITE,
    _LOSS_SCALE,
    _GRADIENT_NORM,
    _MEMORY,
    _COMMUNICATION,
    _INPUT,
    _FORWARD,
) = (int(bit) for bit in _Known)


class DeviceMemory(NamedTuple):
    """Bytes of the process's CUDA device as torch's allocator counts them."""

    allocated: int
    reserved: int
    peak: int
    """The most that was allocated at a time."""


class Message(NamedTuple):
    """One heartbeat; None is unknown."""

    step: int
    """Optimizer steps so far, skipped ones among them."""
    sent: float
    """Sender's monotonic clock in seconds.

    When what the message tells began, its stage above all.
    """
    phase: int = Phase.TRAINING
    stage: int = StepStage.UNKNOWN
    last_seconds: float | None = None
    """Duration of the last step, pauses left out."""
    mean_seconds: float | None = None
    """Moving average over about ten steps; known where `last_seconds` is."""
    input_seconds: float | None = None
    """Moving average of what a step waits for its input: on CUDA, for which the device waits."""
    forward_seconds: float | None = None
    """Moving average of what the forward passes of a step take."""
    skipped: int | None = None
    """Steps so far that were skipped for an overflow."""
    loss_finite: bool | None = None
    nonfinite: int = 0
    """Losses so far that were not finite; known where `loss_finite` is."""
    loss_scale: float | None = None
    gradient_norm: float | None = None
    memory: DeviceMemory | None = None
    communication_seconds: float | None = None
    """Time in collectives so far."""


def encode(message: Message) -> bytes:
    """Return a heartbeat's message as bytes; struct.error if a count is out of range."""
    (
        step,
        sent,
        phase,
        stage,
        last,
        mean,
        inputs,
        forward,
        skipped,
        finite,
        nonfinite,
        scale,
        norm,
        memory,
        communication,
    ) = message
    known = 0
    if last is not None:
        known = _STEP_SECONDS
    if skipped is not None:
        known |= _SKIPPED
    if finite is not None:
        known |= _LOSS | _LOSS_FINITE if finite else _LOSS
    if scale is not None:
        known |= _LOSS_SCALE
    if norm is not None:
        known |= _GRADIENT_NORM
    if memory is not None:
        known |= _MEMORY
    if communication is not None:
        known |= _COMMUNICATION
    if inputs is not None:
        known |= _INPUT
    if forward is not None:
        known |= _FORWARD
    allocated, reserved, peak = memory or (0, 0, 0)
    body = _BODY.pack(
        phase, stage, known, step, skipped or 0, nonfinite, sent, last or 0.0, mean or 0.0, inputs or 0.0, forward or 0.0, scale or 0.0,
        norm or 0.0, communication or 0.0, allocated, reserved, peak,
    )  # fmt: skip
    return _HEADER.pack(MAGIC, VERSION, SIZE, crc32(body)) + body


def decode(data: bytes) -> Message:
    """Return the heartbeat's message that bytes begin with; ValueError if they hold none.

    It is trusted as its own sender's account only.
    """
    if len(data) < SIZE:
        message = f"{len(data)} bytes are no heartbeat"
        raise ValueError(message)
    magic, version, length, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or version < VERSION or not SIZE <= length <= len(data):
        message = f"no heartbeat: it begins with {data[:8]!r}"
        raise ValueError(message)
    if crc32(data[_HEADER.size : length]) != checksum:
        message = "the checksum is wrong"
        raise ValueError(message)
    (
        phase,
        stage,
        known,
        step,
        skipped,
        nonfinite,
        sent,
        last,
        mean,
        inputs,
        forward,
        scale,
        norm,
        communication,
        *memory,
    ) = _BODY.unpack_from(data, _HEADER.size)
    if max(step, skipped, nonfinite, *memory) > MAX_COUNT:
        message = "a count is beyond 2^53"
        raise ValueError(message)
    for name, value in (
        ("sent", sent), ("step time", last), ("mean step time", mean), ("input", inputs), ("forward pass", forward),
        ("communication", communication),
    ):  # fmt: skip
        if not 0.0 <= value < math.inf:
            message = f"{name}: {value} s"
            raise ValueError(message)
    if not scale >= 0.0:
        message = f"loss scale: {scale}"
        raise ValueError(message)
    return Message(
        step=step,
        sent=sent,
        phase=min(phase, Phase.OTHER),
        stage=stage if stage <= StepStage.BACKWARD else StepStage.UNKNOWN,
        last_seconds=last if known & _STEP_SECONDS else None,
        mean_seconds=mean if known & _STEP_SECONDS else None,
        input_seconds=inputs if known & _INPUT else None,
        forward_seconds=forward if known & _FORWARD else None,
        skipped=skipped if known & _SKIPPED else None,
        loss_finite=bool(known & _LOSS_FINITE) if known & _LOSS else None,
        nonfinite=nonfinite,
        loss_scale=scale if known & _LOSS_SCALE else None,
        gradient_norm=norm if known & _GRADIENT_NORM else None,
        memory=DeviceMemory(*memory) if known & _MEMORY else None,
        communication_seconds=communication if known & _COMMUNICATION else None,
    )


def newest(page: bytes) -> Message:
    """Return the later heartbeat message of a page; ValueError if neither is whole."""
    found, why = [], "no heartbeat"
    for start in range(0, PAGE, SLOT):
        try:
            found.append(decode(page[start : start + SLOT]))
        except ValueError as error:
            why = str(error)
    if not found:
        raise ValueError(why)
    return max(found, key=lambda message: message.sent)
