"""One process's heartbeat: what it says, and that nothing of it reaches the training."""

from __future__ import annotations

import fcntl
import itertools
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator

import pytest

from dshealthd.training import attach, step_timer
from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.message import PAGE, Phase
from dshealthd.training.position import FORWARD, INPUT
from tests.stopwatch import Stopwatch
from tests.training.agents_end import AgentsEnd, forked
from tests.training.step_clock import average

AVERAGED = 10


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    """Return a heartbeat that an agent hears."""
    made = Heartbeat()
    yield made
    made.close()


def spaced(heartbeat: Heartbeat, steps: int, seconds: float = 0.015) -> list[tuple[float, float]]:
    """Make so many steps of some length, and return when each was told: not before, not after."""
    told = []
    for _ in range(steps):
        time.sleep(seconds)
        before = time.monotonic()
        heartbeat.step()
        told.append((before, time.monotonic()))
    return told


def test_every_step_is_told(agents_end: AgentsEnd) -> None:
    """A step is told as it ends; the first has no duration, as its beginning is unknown."""
    heartbeat = Heartbeat(step=100)
    ((last, _),) = spaced(heartbeat, 1)
    message = agents_end.message()
    assert (message.step, message.last_seconds) == (101, None)
    for step in (102, 103):
        ((before, after),) = spaced(heartbeat, 1)
        message = agents_end.message()
        assert message.step == step
        assert before <= message.sent <= after
        assert message.last_seconds is not None
        assert 0.015 <= message.last_seconds <= after - last
        last = before
    heartbeat.close()


def test_unknown_is_not_told(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """What the training does not compute is unknown, not 0."""
    spaced(heartbeat, 2)
    message = agents_end.message()
    assert message.loss_finite is message.loss_scale is message.skipped is None
    assert message.gradient_norm is None
    assert message.memory is None
    assert message.communication_seconds is message.input_seconds is None
    assert message.stage == 0


def test_size_of_the_page_is_sealed(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """The page that the agent reads stays as long as it is, whatever becomes of the training."""
    heartbeat.step()
    agents_end.message()
    page = writable(agents_end)
    for size in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(page, size)
    seals = fcntl.fcntl(page, fcntl.F_GET_SEALS)
    os.close(page)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW


def writable(agents_end: AgentsEnd) -> int:
    """Return a descriptor of the only page, to change it."""
    (page,) = agents_end.pages
    return os.open(f"/proc/self/fd/{page}", os.O_RDWR)


def test_process_that_stops_while_it_writes(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """Of a message that is half written the one before it is left, with the position."""
    spaced(heartbeat, 3)
    third = agents_end.message()
    spaced(heartbeat, 1, 0.1)
    fourth = agents_end.message()
    assert (fourth.step, fourth.last_seconds) != (4, third.last_seconds)
    page = writable(agents_end)
    with mmap.mmap(page, PAGE) as memory:
        memory[PAGE // 2 + 40] ^= 255  # the fourth message is in the second half
    os.close(page)
    assert agents_end.message() == third._replace(step=4, sent=fourth.sent)


def test_mean_forgets_a_long_first_step(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """The mean follows the steps, and the first, which compiles, does not weigh on it for long."""
    told = spaced(heartbeat, 1, 0.0) + spaced(heartbeat, 1, 0.3)
    told += spaced(heartbeat, 5 * AVERAGED, 0.011)
    mean = agents_end.message().mean_seconds
    assert mean is not None
    first, *most = [after - last for (last, _), (_, after) in itertools.pairwise(told)]
    assert 0.011 <= mean <= average(most) + first / 500


def test_phases(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """A phase is told as it begins and ends, and its time is not that of a step."""
    began = time.monotonic()
    heartbeat.step()
    phases = []
    with heartbeat.phase("evaluation"):
        entered = time.monotonic()
        phases.append(agents_end.message().phase)
        time.sleep(0.2)
        with heartbeat.phase("checkpoint"):
            phases.append(agents_end.message().phase)
            time.sleep(0.1)
        phases.append(agents_end.message().phase)
        left = time.monotonic()
    phases.append(agents_end.message().phase)
    assert phases == [Phase.EVALUATION, Phase.CHECKPOINT, Phase.EVALUATION, Phase.TRAINING]
    ((_, after),) = spaced(heartbeat, 1)
    last = agents_end.message().last_seconds
    assert last is not None
    assert 0.015 <= last <= entered - began + after - left


def test_phase_that_is_not_ended(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """A step ends a phase that was left open, and is not timed."""
    spaced(heartbeat, 2)
    before = agents_end.message()
    heartbeat.enter("something else")
    assert agents_end.message().phase == Phase.OTHER
    spaced(heartbeat, 1, 0.3)
    after = agents_end.message()
    assert after.phase == Phase.TRAINING
    assert after.last_seconds == before.last_seconds


def test_evaluation_that_nobody_marks(
    monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat
) -> None:
    """It counts from the step or the pass before, in the thread that trains, between two steps."""
    now = 100.0
    for module in ("heartbeat", "position"):
        monkeypatch.setattr(f"dshealthd.training.{module}.monotonic", lambda: now)
    heartbeat.step()
    found = []
    for stage, phase, is_main in (
        (INPUT, "training", True),
        (INPUT, "training", True),
        (INPUT, "training", False),
        (INPUT, "checkpoint", True),
        (FORWARD, "training", True),
    ):
        heartbeat.enter(phase)
        heartbeat.stage = stage
        now += 2.0
        thread = threading.Thread(target=heartbeat.evaluated)
        (thread.run if is_main else thread.start)()
        if not is_main:
            thread.join()
        found.append(heartbeat._evaluation)
    assert found == [2.0, 4.0, 4.0, 4.0, 4.0]


def test_seconds_in_phases(monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat) -> None:
    """Each counts until the next begins, and none before the first step has ended."""
    entered = {110.0: "checkpoint", 113.0: "training", 120.0: "checkpoint", 124.0: "evaluation"}
    now = 100.0
    monkeypatch.setattr("dshealthd.training.heartbeat.monotonic", lambda: now)
    heartbeat.enter("evaluation")
    now = 105.0
    heartbeat.step()
    for now, name in entered.items():  # noqa: B007 - the clock
        heartbeat.enter(name)
    now = 130.0
    heartbeat.step()
    assert heartbeat._marked == {Phase.EVALUATION: 6.0, Phase.CHECKPOINT: 7.0}


@pytest.mark.parametrize(
    ("loss", "finite"),
    [(1.5, True), (math.nan, False), (math.inf, False), (-math.inf, False), (0, True)],
)
def test_loss(agents_end: AgentsEnd, heartbeat: Heartbeat, loss: float, *, finite: bool) -> None:
    """Whether the last one is finite is told, since which step, and when one last was."""
    for one in (1.0, math.nan, 1.0, loss, loss):
        heartbeat.loss(one)
        heartbeat.step()
    message = agents_end.message()
    assert message.loss_finite is finite
    assert (message.finite_step, message.nonfinite_step) == ((5, 2) if finite else (3, 4))


def test_agent_that_comes_late(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """What an agent finds that looks at nothing for long is the present, and nobody waited for
    it.
    """
    watch = Stopwatch()
    for _ in range(2000):
        heartbeat.step()
    assert watch.seconds() < 1.0
    assert agents_end.message().step == 2000


def test_most_steps_are_brief(monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat) -> None:
    """A step that is not measured moves the position alone, whether the caller counts itself or
    not; where its count jumps, all is told.
    """
    monkeypatch.setattr(step_timer, "SHARE", 0.0)
    whole, step = list[int](), Heartbeat._step

    def counted(self: Heartbeat, steps: int) -> None:
        whole.append(steps)
        step(self, steps)

    monkeypatch.setattr(Heartbeat, "_step", counted)
    spaced(heartbeat, 20, 0.0)
    found = []
    for stride in (0, 1, 2):
        whole.clear()
        for _ in range(50):
            heartbeat.step(heartbeat.steps + stride if stride else None)
        found.append(len(whole))
    assert max(found[:2]) <= 5  # one in each second, on a busy machine
    assert found[2] == 50


@pytest.mark.parametrize("share", [math.inf, 0.0])
def test_fork(agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A child of fork has a page of its own, and leaves its parent's alone, in a step that is
    measured or not.
    """
    monkeypatch.setattr(step_timer, "SHARE", share)
    heartbeat = Heartbeat()
    spaced(heartbeat, 20, 0.0)
    assert heartbeat.measures is (share > 0)
    with forked(lambda: spaced(heartbeat, 5, 0.0)):
        assert [message.step for message in agents_end.messages()] == [20, 25]
    spaced(heartbeat, 1)
    assert [message.step for message in agents_end.messages()] == [21, 25]
    heartbeat.close()


def test_threads(agents_end: AgentsEnd, heartbeat: Heartbeat) -> None:
    """Several threads that step at the same time do no harm."""
    heartbeat.step()
    threads = [threading.Thread(target=spaced, args=(heartbeat, 20, 0.001)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not heartbeat.closed
    heartbeat.step()
    assert agents_end.message().step > 20


def test_defects_stay_inside(
    agents_end: AgentsEnd, caplog: pytest.LogCaptureFixture, heartbeat: Heartbeat
) -> None:
    """An error is logged once, ends the heartbeat, and does not reach the training."""
    spaced(heartbeat, 1)
    assert agents_end.message().step == 1
    heartbeat.gradient_norm(object())
    assert not heartbeat.closed, "what is no number is not read"
    with caplog.at_level(logging.WARNING, "dshealthd.training"):
        heartbeat.step(-5)
        spaced(heartbeat, 3)
    (record,) = (one for one in caplog.records if one.name == "dshealthd.training")
    assert record.message.startswith(
        "heartbeat stopped after an error; training goes on\nTraceback"
    )
    assert record.message.endswith("ValueError: -5 steps\n")
    assert record.exc_info is None, "it has all that is on the stack"
    assert agents_end.message().step == 1
    assert not heartbeat._page.is_open


def test_what_cannot_be_attached_to(caplog: pytest.LogCaptureFixture) -> None:
    """An engine or optimizer that is none is said by the log, and nothing is raised."""
    with caplog.at_level(logging.WARNING, "dshealthd.training"):
        assert attach(object()).closed
        assert attach(optimizer=object()).closed
    assert "object is not a DeepSpeed engine" in caplog.text


def test_attach_to_nothing() -> None:
    """A call that names nothing, or two things, is a mistake in the script."""
    with pytest.raises(TypeError, match="attach"):
        attach()
    with pytest.raises(TypeError, match="attach"):
        attach(object(), optimizer=object())
