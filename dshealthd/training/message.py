"""The binary message of a heartbeat, from a training process to the agent.

A message has a fixed layout, little-endian, in a page that both processes map or read.

The layout grows only at its end, and its version with it: an agent reads the fields it knows of a
newer message. Any field but the step may be unknown; a bit says so, so an unknown is never 0.
Counters only grow, so a message that is overwritten unread loses nothing.

The page holds two messages, written in turn: a process that is stopped while it writes one leaves
the other whole. Each has a checksum, which exposes a message read while it is being written, even
on processors that reorder stores.

Words beside the messages, each of which is stored whole, say more:

- How far the process is, at each step and stage of one: a message a step would cost a training too
  much. Before the first of them the stage is unknown.
- In which collective it waits between two steps, where nothing else tells a rank that waits for
  others from one that they wait for.
- Which thread trains, and when its collectives time out.
"""

from __future__ import annotations

import enum
import math
import struct
from binascii import crc32
from typing import NamedTuple

MAGIC = b"dshb"
VERSION = 5
"""Of the layout below. A later one adds to its end and is read as far as this; earlier ones, which
trainings from an older checkout write, had their fields elsewhere and are no heartbeats.
"""
SLOT = 512
"""Bytes from one message of a page to the next."""
ROOM = 256
"""Bytes at the end of each slot that no message of any version uses: they hold the note of
`dshealthd.training.page`.
"""
PAGE = 2 * SLOT
WAIT = struct.Struct("=HH")
"""The word of a wait: one more than the type of the collective as c10d numbers it, 0 in none, with
the mark of its group in the upper byte; and the number of the wait, so that the next one of the
same type is another.
"""
GROUP_BIT = 8
"""Where in it the mark of the group begins."""
WAIT_AT = SLOT - ROOM - WAIT.size
"""Its place in the page."""
PROCESS = struct.Struct("<II")
"""Words of the process: the id of the thread that trains, in its own pid namespace, 0 for the main
thread; and seconds after which its collectives time out, 0 if unknown.
"""
PROCESS_AT = WAIT_AT - PROCESS.size
POSITION = struct.Struct("=Qd")
"""The words of the position: step, number of the forward pass and stage in one, and the time at
which the process came there.
"""
PASS_BIT, STEP_BIT = 2, 18
"""Where in the first of them the number of the pass begins, and the step."""
POSITION_AT = PAGE - ROOM - POSITION.size
MAX_PASSES = (1 << 16) - 1
"""The most forward passes of a step that are counted."""
MAX_COUNT = 10**12
"""The largest count of steps or losses: a step each microsecond for eleven days. A float64 holds it
exactly.
"""
MAX_MEMORY = 1 << 50
"""The most bytes of a device's memory: of 2026's largest, with its host's, a terabyte."""
SHORTEST_STEP, LONGEST_STEP = 1e-6, 1e7
"""Seconds that a step can take: Python begins nothing within a microsecond, and no job waits four
months for one step.
"""
INSTANT = 1e-9
"""Seconds of a part of a step below which it took none: clocks count nanoseconds, and less is what
subtraction leaves.
"""
MAX_TOTAL = 1e10
"""The most seconds of a clock that begins at a boot, or of what a job adds up: three centuries."""
MAX_FLOAT32 = 3.5e38
"""The largest loss scale and norm: torch holds both as float32."""

_HEADER = struct.Struct("<4sBxHI")
"""Magic, version, length, and the checksum of everything after the header."""
_BODY = struct.Struct("<BxxxIQQQQddddddddQQQddHH4xQQdd")
SIZE = _HEADER.size + _BODY.size
(
    _STEP_SECONDS, _SKIPPED, _LOSS, _LOSS_FINITE, _LOSS_SCALE, _GRADIENT_NORM, _MEMORY,
    _COMMUNICATION, _INPUT, _OWN, _ON_DEVICE, _PIPELINE, _TOTALS, _EVALUATION,
) = (1 << bit for bit in range(14))  # fmt: skip
"""Which fields of a message are known: plain numbers, as an IntFlag would cost more than the
rest."""


class OlderLayout(ValueError):
    """A heartbeat of an earlier version, whose fields are elsewhere."""


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


class WaitSource(enum.IntEnum):
    """Whose clock tells a step's wait and own work."""

    HOST = 0
    """The host's: the process blocks while it waits."""
    DEVICE = 1
    """That of a CUDA device, whose stream waits."""


class DeviceMemory(NamedTuple):
    """Bytes of the process's CUDA device, as counted by torch's allocator."""

    allocated: int
    reserved: int
    peak: int
    """The most that was allocated at one time."""


class Totals(NamedTuple):
    """Sums over all steps; where not each is measured, those before count as the next that is."""

    step: int
    """The last of these steps, as `Message.step` counts: on a device some are still under way."""
    steps: int
    """How many they are: fewer than `step` where some have a marked pause."""
    work_seconds: float
    wait_seconds: float


class Message(NamedTuple):
    """One heartbeat; None is unknown."""

    step: int
    """Optimizer steps so far, including skipped ones."""
    sent: float
    """Time of the last event, such as the start of a stage: the sender's monotonic clock in
    seconds."""
    phase: int = Phase.TRAINING
    stage: int = StepStage.UNKNOWN
    """As the position says, which stands beside the messages (`POSITION`)."""
    last_seconds: float | None = None
    """Duration of the last measured step without pauses."""
    mean_seconds: float | None = None
    """Moving average over about ten measured steps; known if `last_seconds` is."""
    input_seconds: float | None = None
    """Moving average of a step's wait for its input; on CUDA, of the device's wait."""
    skipped: int | None = None
    """Steps so far that were skipped because of an overflow."""
    loss_finite: bool | None = None
    finite_step: int = 0
    """The last step whose loss is known to be finite; 0 if none is."""
    nonfinite_step: int = 0
    """The first after it whose loss is known not to be; holds if `loss_finite` is False."""
    loss_scale: float | None = None
    gradient_norm: float | None = None
    memory: DeviceMemory | None = None
    communication_seconds: float | None = None
    """Time in collectives so far."""
    wait_seconds: float | None = None
    """Time of a step in which the rank waited for others: average over about ten steps."""
    work_seconds: float | None = None
    """The rest of the step: what the rank did itself; known if `wait_seconds` is."""
    wait_source: int = WaitSource.HOST
    pipeline_stage: int | None = None
    """The stage of the pipeline that the rank computes; None without a pipeline."""
    forward_pass: int = 0
    """Forward passes that the step has begun so far, by the position; 0 before the first, or
    unknown."""
    forward_passes: int = 0
    """Forward passes of a usual step, several where gradients accumulate; 0 if unknown."""
    totals: Totals | None = None
    evaluation_seconds: float | None = None
    """Time so far in forward passes in evaluation mode, in no marked phase; in no step above."""
    collective: tuple[int, int] = (0, 0)
    """The word of a wait, which stands beside the messages (`WAIT`)."""
    thread: int = 0
    """The thread that trains, as the process itself numbers it; 0 is the main one (`PROCESS`)."""
    timeout: int = 0
    """Seconds after which its collectives time out, which ends the job; 0 if unknown."""


def encode(message: Message) -> bytes:
    """Return a heartbeat message as bytes, without what stands beside it in the page; struct.error
    if a count is out of range.
    """
    (
        step, sent, phase, _stage, last, mean, inputs, skipped, finite, finite_step,
        nonfinite_step, scale, norm, memory, communication, wait, work, source, pipeline_stage,
        _forward_pass, forward_passes, totals, evaluation, _collective, _thread, _timeout,
    ) = message  # fmt: skip
    known = _LOSS_FINITE if finite else 0
    if work is not None and source:
        known |= _ON_DEVICE
    for bit, value in (
        (_STEP_SECONDS, last), (_SKIPPED, skipped), (_LOSS, finite), (_LOSS_SCALE, scale),
        (_GRADIENT_NORM, norm), (_MEMORY, memory), (_COMMUNICATION, communication),
        (_INPUT, inputs), (_OWN, work), (_PIPELINE, pipeline_stage), (_TOTALS, totals),
        (_EVALUATION, evaluation),
    ):  # fmt: skip
        if value is not None:
            known |= bit
    allocated, reserved, peak = memory or (0, 0, 0)
    body = _BODY.pack(
        phase, known, step, skipped or 0, finite_step, nonfinite_step, sent, last or 0.0,
        mean or 0.0, inputs or 0.0, evaluation or 0.0, scale or 0.0, norm or 0.0,
        communication or 0.0, allocated, reserved, peak, wait or 0.0, work or 0.0,
        pipeline_stage or 0, min(forward_passes, MAX_PASSES), *(totals or (0, 0, 0.0, 0.0)),
    )  # fmt: skip
    return _HEADER.pack(MAGIC, VERSION, SIZE, crc32(body)) + body


def decode(data: bytes) -> Message:
    """Return the heartbeat message at the start of `data`; ValueError if there is none,
    `OlderLayout` if it has an earlier version.

    The message is trusted only as its sender's own claim. What no clock or counter gives is no
    message; a figure that no training has is unknown, so that its rank is still watched.
    """
    magic, version, length, checksum = _HEADER.unpack_from(data.ljust(_HEADER.size))
    body = data[_HEADER.size : length]
    if magic == MAGIC and 0 < version < VERSION and crc32(body) == checksum:
        raise OlderLayout(f"not a heartbeat of version {VERSION}, but of {version}")
    if len(data) < max(SIZE, length if magic == MAGIC else 0):
        raise ValueError(f"{len(data)} bytes are too few for a heartbeat")
    if magic != MAGIC or version < VERSION or length < SIZE:
        raise ValueError(f"not a heartbeat: it begins with {data[:8]!r}")
    if crc32(body) != checksum:
        raise ValueError("wrong checksum")
    (
        phase, known, step, skipped, finite_step, nonfinite_step, sent, last, mean, inputs,
        evaluation, scale, norm, communication, allocated, reserved, peak, wait, work,
        pipeline_stage, forward_passes, *sums,
    ) = _BODY.unpack_from(body)  # fmt: skip
    memory, totals = DeviceMemory(allocated, reserved, peak), Totals(*sums)
    if max(step, skipped, finite_step, nonfinite_step) > MAX_COUNT or sent > MAX_TOTAL:
        raise ValueError(f"a count exceeds {MAX_COUNT}, or the time {sent} s is none since a boot")
    for name, value in (
        ("sent", sent), ("step time", last), ("mean step time", mean), ("input", inputs),
        ("communication", communication), ("wait", wait), ("work", work),
        ("evaluation so far", evaluation if known & _EVALUATION else 0.0),
        ("work so far", totals.work_seconds), ("wait so far", totals.wait_seconds),
    ):  # fmt: skip
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: {value} s")
    if not scale >= 0.0:
        raise ValueError(f"loss scale {scale} is not a positive number")
    if not SHORTEST_STEP <= min(last, mean) <= max(last, mean) <= LONGEST_STEP:
        known &= ~_STEP_SECONDS
    if max(wait, work) > LONGEST_STEP:
        known &= ~_OWN
    inputs, wait, work = (
        seconds if seconds >= INSTANT else 0.0 for seconds in (inputs, wait, work)
    )
    for value, most, bit in (
        (inputs, LONGEST_STEP, _INPUT),
        (communication, MAX_TOTAL, _COMMUNICATION), (scale, MAX_FLOAT32, _LOSS_SCALE),
        (max(memory), MAX_MEMORY, _MEMORY), (max(totals[:2]), MAX_COUNT, _TOTALS),
        (totals.work_seconds + totals.wait_seconds, MAX_TOTAL, _TOTALS),
        (evaluation, MAX_TOTAL, _EVALUATION),
    ):  # fmt: skip
        if value > most:
            known &= ~bit
    # What is not finite is a norm like any other: that of a step which is skipped.
    if math.isfinite(norm) and not 0.0 <= norm <= MAX_FLOAT32:
        known &= ~_GRADIENT_NORM
    return Message(
        step=step,
        sent=sent,
        phase=min(phase, Phase.OTHER),
        last_seconds=last if known & _STEP_SECONDS else None,
        mean_seconds=mean if known & _STEP_SECONDS else None,
        input_seconds=inputs if known & _INPUT else None,
        skipped=skipped if known & _SKIPPED else None,
        loss_finite=bool(known & _LOSS_FINITE) if known & _LOSS else None,
        finite_step=finite_step,
        nonfinite_step=nonfinite_step,
        loss_scale=scale if known & _LOSS_SCALE else None,
        gradient_norm=norm if known & _GRADIENT_NORM else None,
        memory=memory if known & _MEMORY else None,
        communication_seconds=communication if known & _COMMUNICATION else None,
        wait_seconds=wait if known & _OWN else None,
        work_seconds=work if known & _OWN else None,
        wait_source=WaitSource.DEVICE if known & _ON_DEVICE else WaitSource.HOST,
        pipeline_stage=pipeline_stage if known & _PIPELINE else None,
        forward_passes=forward_passes,
        totals=totals if known & _TOTALS else None,
        evaluation_seconds=evaluation if known & _EVALUATION else None,
    )


def newest_message(page: bytes) -> Message:
    """Return the newer heartbeat message of a page, brought to the position of its process;
    ValueError if neither is whole, `OlderLayout` if one has an earlier version.
    """
    found, why = [], "no heartbeat"
    for start in range(0, PAGE, SLOT):
        try:
            found.append(decode(page[start : start + SLOT]))
        except OlderLayout:
            raise
        except (ValueError, ArithmeticError) as error:
            why = str(error)
    if not found:
        raise ValueError(why)
    latest = max(found, key=lambda message: message.sent)
    thread, timeout = PROCESS.unpack_from(page, PROCESS_AT)
    latest = latest._replace(
        collective=WAIT.unpack_from(page, WAIT_AT), thread=thread, timeout=timeout
    )
    word, at = POSITION.unpack_from(page, POSITION_AT)
    step = word >> STEP_BIT
    # A process writes its position before the message of the same time.
    if not (latest.sent <= at <= MAX_TOTAL and at > 0.0 and step <= MAX_COUNT):
        return latest
    return latest._replace(
        step=step,
        sent=at,
        stage=word & ((1 << PASS_BIT) - 1),
        forward_pass=word >> PASS_BIT & MAX_PASSES if latest.forward_passes else 0,
    )
