"""How far a process is: told at each step and stage, also of steps that are not measured."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.training import heartbeat, step_timer
from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.message import POSITION, Message, StepStage, Totals, encode, newest_message
from dshealthd.training.step_timer import StepTimer
from tests.training.agents_end import AgentsEnd

ALIKE = 10
MAX_COUNT = 10**12
MAX_PASSES = (1 << 16) - 1
MAX_TOTAL = 1e10
LEAST = 1e-3
PAGE, POSITION_AT, PASS_BIT, STEP_BIT = 1024, 752, 2, 18
"""Agents read pages of other releases: what is where in them stays."""

MESSAGE = Message(7, 100.0, forward_passes=3)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as few steps as there may be, as of very short ones."""
    monkeypatch.setattr(step_timer, "SHARE", 0.0)


def word(step: int, forward_pass: int, stage: int) -> int:
    """Return the first word of a position."""
    return step << STEP_BIT | forward_pass << PASS_BIT | stage


def page(message: Message, *position: float) -> bytes:
    """Return a page with a message and a position."""
    data = bytearray(encode(message).ljust(PAGE, b"\0"))
    if position:
        POSITION.pack_into(data, POSITION_AT, *position)
    return bytes(data)


def test_position_says_how_far_the_process_is() -> None:
    """The step, the stage and the forward pass are those of the position, and so is the time."""
    found = newest_message(page(MESSAGE, word(MAX_COUNT, 2, StepStage.BACKWARD), 101.0))
    assert found == MESSAGE._replace(
        step=MAX_COUNT, sent=101.0, stage=StepStage.BACKWARD, forward_pass=2
    )
    alone = MESSAGE._replace(forward_passes=0)  # then their number says nothing
    assert newest_message(page(alone, word(8, 2, StepStage.FORWARD), 101.0)).forward_pass == 0


@pytest.mark.parametrize("position", [
    (),
    (word(9, 1, 2), 0.0),
    (0, 0.0),
    (word(9, 1, 2), math.nextafter(100.0, 0.0)),
    (word(9, 1, 2), math.nan),
    (word(9, 1, 2), math.nextafter(MAX_TOTAL, math.inf)),
    (word(MAX_COUNT + 1, 1, 2), 101.0),
    (word(9, 1, 2), -1.0),
])  # fmt: skip
def test_what_is_no_position(position: tuple[float, ...]) -> None:
    """Words that are not written yet, older than the message or out of range: it counts alone."""
    assert newest_message(page(MESSAGE, *position)) == MESSAGE


def test_position_of_the_time_of_the_message() -> None:
    """Counts, as it is written first; without a time it is none, whatever the message says."""
    forward = word(9, 1, StepStage.FORWARD)
    assert newest_message(page(MESSAGE, forward, 100.0)).stage == StepStage.FORWARD
    assert not newest_message(page(MESSAGE._replace(sent=0.0), forward, 0.0)).stage


STORES = """
import mmap, sys, time
from dshealthd.training.message import MAX_PASSES
from dshealthd.training.position import Position
memory = memoryview(mmap.mmap(int(sys.argv[1]), 1024))[int(sys.argv[2]):][:16]
position = Position(0, memory.cast("Q"), memory.cast("d"))
print(flush=True)
while True:
    position.steps = position._passes = (position.steps * 3 + 1) & MAX_PASSES
    position.move(position.steps & 3)
"""


def test_position_is_read_whole() -> None:
    """No part of an earlier position is read with a part of a later one, however often it moves."""
    file = os.memfd_create("page", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, PAGE)
    writer = subprocess.Popen(
        [sys.executable, "-c", STORES, str(file), str(POSITION_AT)],
        pass_fds=[file],
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        seen, looks = set[int](), 0
        while looks < 30_000 or len(seen) < 2:
            looks += 1
            found, at = POSITION.unpack_from(os.pread(file, PAGE, 0), POSITION_AT)
            step = found >> STEP_BIT
            assert (found >> PASS_BIT & MAX_PASSES, found & 3) == (step, step & 3)
            assert 0.0 <= at <= time.monotonic()
            seen.add(step)
    finally:
        writer.kill()
        writer.communicate()
        os.close(file)


@pytest.mark.usefixtures("few")
def test_stages_of_steps_that_are_not_measured(agents_end: AgentsEnd) -> None:
    """Each step, stage and forward pass is told as it begins, though nothing else is."""
    heartbeat = Heartbeat()
    model = SimpleNamespace(parameters=lambda: iter(()))
    measured: list[bool] = []
    told: list[tuple[int, int]] = []
    usual = 0

    def tell(step: int) -> None:
        message = agents_end.message()
        assert message.step == step
        assert before <= message.sent <= time.monotonic()
        told.append((message.forward_pass, message.stage))

    for step in range(60):
        measured.append(heartbeat.measures)
        told.clear()
        for number in range(2):
            if number:
                before = time.monotonic()
                heartbeat.micro_step()
                tell(step)
            before = time.monotonic()
            heartbeat.forward_began(model)
            tell(step)
            before = time.monotonic()
            heartbeat.forward_ended()
            tell(step)
        before = time.monotonic()
        heartbeat.step()
        tell(step + 1)
        passes = (1, 1, 1, 2, 2, 0) if usual else (0,) * 6
        assert told == list(zip(passes, (2, 3, 1, 2, 3, 1), strict=True))
        usual = agents_end.message().forward_passes  # after some seconds
    assert sum(measured) == 2  # until the time of a step is known
    heartbeat.close()


@pytest.mark.usefixtures("few")
def test_usual_passes_are_told_of_steps_that_are_not_measured(agents_end: AgentsEnd) -> None:
    """That steps have another number of forward passes is told with the next message at the latest,
    and each step that has another number is counted.
    """
    heartbeat = Heartbeat()
    model = SimpleNamespace(parameters=lambda: iter(()))

    def step(passes: int) -> int:
        for _ in range(passes):
            heartbeat.forward_began(model)
        heartbeat.step()
        return agents_end.message().forward_passes

    assert step(2) == 0
    for _ in range(10 * ALIKE):
        heartbeat._brief_until = 0
        assert step(2) in {0, 2}
    assert step(2) == 2
    numbers = itertools.islice(itertools.cycle((3, 4)), 4 * ALIKE)
    assert [step(number) for number in numbers][-1] == 0
    heartbeat.close()


@pytest.mark.usefixtures("few")
def test_a_message_is_due_each_second(
    agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that become long are timed though none of them is one that is measured."""
    monkeypatch.setattr(heartbeat, "SLOW_INTERVAL", 0.1)
    sender = Heartbeat()
    began = time.monotonic()
    for _ in range(20):
        sender.step()
    last = agents_end.message().last_seconds
    assert last is not None
    assert last <= time.monotonic() - began
    for _ in range(3):
        time.sleep(0.2)
        sender.step()
        assert not sender.measures
    last = agents_end.message().last_seconds
    assert last is not None
    assert last >= 0.2
    sender.close()


@pytest.mark.usefixtures("few")
def test_pause_in_a_step_that_is_not_measured(agents_end: AgentsEnd) -> None:
    """A phase is told at once, and its time is none of a step."""
    heartbeat = Heartbeat()
    began = time.monotonic()
    for _ in range(20):
        heartbeat.step()
    with heartbeat.phase("evaluation"):
        entered = time.monotonic()
        assert agents_end.message().phase == 1
        time.sleep(0.3)
        left = time.monotonic()
    heartbeat.step()
    heartbeat.enter("other")
    last = agents_end.message().last_seconds
    assert last is not None
    assert last <= entered - began + time.monotonic() - left
    heartbeat.close()


@pytest.mark.parametrize("steps", [MAX_COUNT + 1, 10**15, -1, "many", 1.5, [1]])
def test_steps_that_no_training_makes(steps: Any) -> None:
    """A number of steps that cannot be told ends the heartbeat, and not the training: neither that
    of an earlier run, nor one that the training counts itself.
    """
    told = Heartbeat()
    told.step()
    told.step(steps)
    for one in (told, Heartbeat(step=steps)):
        assert one.closed
        one.forward_began(None)
        one.forward_ended()
        one.micro_step()
        one.step()


def totals(share: float, cost: Callable[[int], tuple[float, float]], steps: int) -> Totals:
    """Return what is told of steps of which a share is measured, if step k takes `cost(k)` seconds
    of work and of waiting.
    """
    timer = StepTimer()
    timer.on("cpu", None)
    timer.share = share
    now, counted, measures = 0.0, 0, True
    for step in range(1, steps + 1):
        work, wait = cost(step)
        if measures:
            timer.waited(now + work, now + work + wait)
        now += work + wait
        measured = timer.next_measured(step + 1) == step + 1
        if measures:
            timer.step_ended(now, step, step - counted)
            counted = step
        elif measured:
            timer.step_began(now)
        measures = measured
    assert timer.totals is not None
    return timer.totals


COSTS: dict[str, Callable[[int], tuple[float, float]]] = {
    "alike": lambda _step: (0.010, 0.005),
    "each tenth logs": lambda step: (0.010 + 0.050 * (step % 10 == 0), 0.005),
    "each hundredth evaluates": lambda step: (0.010 + 0.5 * (step % 100 == 0), 0.005),
    "every other waits": lambda step: (0.010, 0.002 + 0.010 * (step % 2)),
    "of 128": lambda step: (0.010, 0.002 + 0.1 * (step % 128 == 0)),
    "by Fibonacci's number": lambda step: (0.010 + 0.1 * (step % 34 == 0), 0.005),
    "random": lambda step: (0.001 * (step * 7919 % 31), 0.001 * (step * 104729 % 17)),
    "growing": lambda step: (0.010 + 1e-6 * step, 0.005),
}


@pytest.mark.parametrize("share", [1.0, 0.31, 0.05])
@pytest.mark.parametrize("cost", COSTS)
def test_totals_of_measured_steps_are_those_of_all(cost: str, share: float) -> None:
    """Own work and wait are not biased by what is left out, whatever is done in which steps."""
    steps = 20_000
    found = totals(share, COSTS[cost], steps)
    assert found.steps >= steps - 3 / share - 1
    costs = [COSTS[cost](step) for step in range(2, found.step + 1)]
    for told, true in zip(found[2:], map(sum, zip(*costs, strict=True)), strict=True):
        assert told == pytest.approx(true, rel=0.1 if share < 1.0 else 1e-3)


def test_steps_of_an_earlier_run_are_not_counted(agents_end: AgentsEnd) -> None:
    """An engine that loads a checkpoint has made its steps elsewhere."""
    heartbeat = Heartbeat()
    heartbeat._step_timer.on("cpu", None)
    for step in (1, 2, 3, 5001, 5002, 40, 41):
        now = time.monotonic()
        heartbeat._step_timer.waited(now, now)
        heartbeat.step(step)
    found = agents_end.message()
    assert found.step == 41
    assert found.totals is not None
    assert (found.totals.step, found.totals.steps) == (41, 6)
    heartbeat.close()


def test_which_steps_are_measured() -> None:
    """The same in all ranks; the next one is found soon, however short steps are."""
    timer = StepTimer()
    timer.share = 0.31
    assert [step for step in range(19) if timer.next_measured(step) == step] == [
        *(0, 2, 5, 10, 13, 15, 18)
    ]
    timer.share = LEAST
    gaps = [timer.next_measured(step) - step for step in range(0, 10**6, 997)]
    assert max(gaps) < 3 / LEAST
