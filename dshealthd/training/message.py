"""What a training process tells the agent: one message of a fixed layout, little-endian.

The layout grows at its end only, and the version with it: an agent reads the fields it knows of a newer message. Everything but the
step itself may be unknown, which a bit says, so that an unknown is never 0. What counts only grows, so that a lost message loses nothing.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import NamedTuple

MAGIC = b"dshb"
VERSION = 1
MAX_SIZE = 1024
"""Bytes of the longest message that any version may have."""
MAX_COUNT = 1 << 53
"""What a float64 holds exactly; no training counts further."""

_LAYOUT = struct.Struct("<4sBBHQQQQddddddQQQ")
SIZE = _LAYOUT.size


class Phase(enum.IntEnum):
    """What the process is busy with; all but training are pauses in which no step is to be expected."""

    TRAINING = 0
    EVALUATION = 1
    CHECKPOINT = 2
    COMPILE = 3
    OTHER = 4


class _Known(enum.IntFlag):
    STEP_SECONDS = 1
    SKIPPED = 2
    LOSS = 4
    LOSS_FINITE = 8
    LOSS_SCALE = 16
    GRADIENT_NORM = 32
    MEMORY = 64
    COMMUNICATION = 128


# Plain numbers: the arithmetic of IntFlag would cost more than the rest of a message.
_STEP_SECONDS, _SKIPPED, _LOSS, _LOSS_FINITE, _LOSS_SCALE, _GRADIENT_NORM, _MEMORY, _COMMUNICATION = (int(bit) for bit in _Known)


class Memory(NamedTuple):
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
    """Sender's monotonic clock in seconds."""
    phase: int = Phase.TRAINING
    lost: int = 0
    """Messages so far that could not be sent."""
    last_seconds: float | None = None
    """Duration of the last step, pauses left out."""
    mean_seconds: float | None = None
    """Moving average over about ten steps; known where `last_seconds` is."""
    skipped: int | None = None
    """Steps so far that were skipped for an overflow."""
    loss_finite: bool | None = None
    nonfinite: int = 0
    """Losses so far that were not finite; known where `loss_finite` is."""
    loss_scale: float | None = None
    gradient_norm: float | None = None
    memory: Memory | None = None
    communication_seconds: float | None = None
    """Time in collectives so far."""


def encode(message: Message) -> bytes:
    """Return a message as bytes; struct.error if a count is out of range."""
    (step, sent, phase, lost, last, mean, skipped, finite, nonfinite, scale, norm, memory, communication) = message
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
    allocated, reserved, peak = memory or (0, 0, 0)
    return _LAYOUT.pack(
        MAGIC, VERSION, phase, known, step, lost, skipped or 0, nonfinite, sent, last or 0.0, mean or 0.0, scale or 0.0, norm or 0.0,
        communication or 0.0, allocated, reserved, peak,
    )  # fmt: skip


def decode(data: bytes) -> Message:
    """Return the message that bytes hold; ValueError if they hold none. Nothing in them is trusted but their own sender's account."""
    if not SIZE <= len(data) <= MAX_SIZE:
        message = f"{len(data)} bytes are no heartbeat"
        raise ValueError(message)
    (magic, version, phase, known, step, lost, skipped, nonfinite, sent, last, mean, scale, norm, communication, *memory) = (
        _LAYOUT.unpack_from(data)
    )
    if magic != MAGIC or version < VERSION:
        message = f"no heartbeat: it begins with {data[:5]!r}"
        raise ValueError(message)
    if max(step, lost, skipped, nonfinite, *memory) > MAX_COUNT:
        message = "a count is beyond 2^53"
        raise ValueError(message)
    for name, value in (("sent", sent), ("step time", last), ("mean step time", mean), ("communication", communication)):
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
        lost=lost,
        last_seconds=last if known & _STEP_SECONDS else None,
        mean_seconds=mean if known & _STEP_SECONDS else None,
        skipped=skipped if known & _SKIPPED else None,
        loss_finite=bool(known & _LOSS_FINITE) if known & _LOSS else None,
        nonfinite=nonfinite,
        loss_scale=scale if known & _LOSS_SCALE else None,
        gradient_norm=norm if known & _GRADIENT_NORM else None,
        memory=Memory(*memory) if known & _MEMORY else None,
        communication_seconds=communication if known & _COMMUNICATION else None,
    )
