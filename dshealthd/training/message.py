"""The binary message of a heartbeat, from a training process to the agent.

A message has a fixed layout, little-endian, in a page that both processes map or read.

The layout grows only at its end, and its version with it: an agent reads the fields it knows of a
newer message. Any field but the step may be unknown; a bit says so, so an unknown is never 0.
Counters only grow, so a message that is overwritten unread loses nothing.

The page holds two messages, written in turn: a process that is stopped while it writes one leaves
the other whole. Each has a checksum, which exposes a message read while it is being written, even
on processors that reorder stores.
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
"""What a process sends when it hands over its page."""
SLOT = 512
"""Bytes from one message of a page to the next."""
ROOM = 256
"""Bytes at the end of each slot that no message of any version uses: they hold the note of
`dshealthd.training.saved`.
"""
PAGE = 2 * SLOT
MAX_COUNT = 1 << 53
"""The largest count that a float64 holds exactly; no training job reaches it."""

_HEADER = struct.Struct("<4sBxHI")
"""Magic, version, length, and the checksum of everything after the header."""
_BODY = struct.Struct("<BBxxIQQQddddddddQQQ")
SIZE = _HEADER.size + _BODY.size


class Phase(enum.IntEnum):
    """What the process is doing; in all phases but training, no step is expected."""

    TRAINING = 0
    EVALUATION = 1
    CHECKPOINT = 2
    COMPILE = 3
    OTHER = 4


class StepStage(enum.IntEnum):
    """How far a step has got on the host; its device may be behind."""

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


# Plain numbers: IntFlag arithmetic would cost more than the rest of a message.
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
    """Bytes of the process's CUDA device, as counted by torch's allocator."""

    allocated: int
    reserved: int
    peak: int
    """The most that was allocated at one time."""


class Message(NamedTuple):
    """One heartbeat; None is unknown."""

    step: int
    """Optimizer steps so far, including skipped ones."""
    sent: float
    """Time of the event that the message reports, such as the start of its stage: the sender's
    monotonic clock in seconds.
    """
    phase: int = Phase.TRAINING
    stage: int = StepStage.UNKNOWN
    last_seconds: float | None = None
    """Duration of the last step without pauses."""
    mean_seconds: float | None = None
    """Moving average over about ten steps; known if `last_seconds` is."""
    input_seconds: float | None = None
    """Moving average of a step's wait for its input; on CUDA, of the device's wait."""
    forward_seconds: float | None = None
    """Moving average of the time of a step's forward passes."""
    skipped: int | None = None
    """Steps so far that were skipped because of an overflow."""
    loss_finite: bool | None = None
    nonfinite: int = 0
    """Losses so far that were not finite; known if `loss_finite` is."""
    loss_scale: float | None = None
    gradient_norm: float | None = None
    memory: DeviceMemory | None = None
    communication_seconds: float | None = None
    """Time in collectives so far."""


def encode(message: Message) -> bytes:
    """Return a heartbeat message as bytes; struct.error if a count is out of range."""
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
    """Return the heartbeat message at the start of `data`; ValueError if there is none.

    The message is trusted only as its sender's own claim.
    """
    if len(data) < SIZE:
        message = f"{len(data)} bytes are too few for a heartbeat"
        raise ValueError(message)
    magic, version, length, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or version < VERSION or not SIZE <= length <= len(data):
        message = f"not a heartbeat: it begins with {data[:8]!r}"
        raise ValueError(message)
    if crc32(data[_HEADER.size : length]) != checksum:
        message = "wrong checksum"
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
        message = "a count exceeds 2^53"
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
    """Return the newer heartbeat message of a page; ValueError if neither is whole."""
    found, why = [], "no heartbeat"
    for start in range(0, PAGE, SLOT):
        try:
            found.append(decode(page[start : start + SLOT]))
        except ValueError as error:
            why = str(error)
    if not found:
        raise ValueError(why)
    return max(found, key=lambda message: message.sent)
