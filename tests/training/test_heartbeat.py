"""One process's heartbeat: what it says, and that nothing of it reaches the training."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from dshealthd.training import attach
from dshealthd.training.heartbeat import AVERAGED, INTERVAL, Heartbeat
from dshealthd.training.message import Phase
from tests.training.agents_end import AgentsEnd

if TYPE_CHECKING:
    from pathlib import Path


def spaced(heartbeat: Heartbeat, steps: int, seconds: float = 1.5 * INTERVAL) -> None:
    """Make so many steps, each long enough for a message of its own."""
    for _ in range(steps):
        time.sleep(seconds)
        heartbeat.step()


def test_every_step_is_told(agents_end: AgentsEnd) -> None:
    """A step is one message; the first has no duration, as its beginning is unknown."""
    heartbeat = Heartbeat(socket=agents_end.path, step=100)
    spaced(heartbeat, 3)
    messages = agents_end.messages()
    assert [message.step for message in messages] == [101, 102, 103]
    assert messages[0].last_seconds is None
    for message in messages[1:]:
        assert message.last_seconds is not None
        assert 1.5 * INTERVAL <= message.last_seconds < 0.5
    assert messages[-1].lost == 0
    heartbeat.close()


def test_unknown_is_not_told(agents_end: AgentsEnd) -> None:
    """What the training does not compute is unknown, not 0: loss, scale, skipped steps, norm, memory, communication."""
    heartbeat = Heartbeat(socket=agents_end.path)
    heartbeat.step()
    (message,) = agents_end.messages()
    assert message.loss_finite is message.loss_scale is message.skipped is message.gradient_norm is None
    assert message.memory is None
    assert message.communication_seconds is None


def test_short_steps_share_messages(agents_end: AgentsEnd) -> None:
    """Steps shorter than the interval have no message each; the next one tells of them all."""
    heartbeat = Heartbeat(socket=agents_end.path)
    for _ in range(1000):
        heartbeat.step()
    spaced(heartbeat, 1)
    messages = agents_end.messages()
    assert messages[-1].step == 1001
    assert len(messages) < 900


def test_mean_forgets_a_long_first_step(agents_end: AgentsEnd) -> None:
    """The mean follows the steps, and the first, which compiles, does not weigh on it for long."""
    heartbeat = Heartbeat(socket=agents_end.path)
    heartbeat.step()
    spaced(heartbeat, 1, 0.3)
    spaced(heartbeat, 5 * AVERAGED, 0.011)
    mean = agents_end.messages()[-1].mean_seconds
    assert mean is not None
    assert 0.011 <= mean < 0.03


def test_phases(agents_end: AgentsEnd) -> None:
    """A phase is told as it begins and ends, and its time is not that of a step."""
    heartbeat = Heartbeat(socket=agents_end.path)
    heartbeat.step()
    with heartbeat.phase("evaluation"):
        time.sleep(0.2)
        with heartbeat.phase("checkpoint"):
            time.sleep(0.1)
    spaced(heartbeat, 1)
    messages = agents_end.messages()
    expected = [Phase.TRAINING, Phase.EVALUATION, Phase.CHECKPOINT, Phase.EVALUATION, Phase.TRAINING, Phase.TRAINING]
    assert [message.phase for message in messages] == expected
    last = messages[-1].last_seconds
    assert last is not None
    assert last < 0.15


def test_phase_that_is_not_ended(agents_end: AgentsEnd) -> None:
    """A step ends a phase that was left open, and is not timed: how long the pause was is unknown."""
    heartbeat = Heartbeat(socket=agents_end.path)
    spaced(heartbeat, 2)
    heartbeat.enter("something else")
    spaced(heartbeat, 1, 0.3)
    before, phase, after = agents_end.messages()[-3:]
    assert (phase.phase, after.phase) == (Phase.OTHER, Phase.TRAINING)
    assert after.last_seconds == before.last_seconds


@pytest.mark.parametrize(("loss", "finite"), [(1.5, True), (math.nan, False), (math.inf, False), (-math.inf, False), (0, True)])
def test_loss(agents_end: AgentsEnd, loss: float, finite: bool) -> None:  # noqa: FBT001 - a parameter
    """NaN and infinite losses are counted, and the last one is told."""
    heartbeat = Heartbeat(socket=agents_end.path)
    heartbeat.loss(loss)
    heartbeat.step()
    (message,) = agents_end.messages()
    assert (message.loss_finite, message.nonfinite) == (finite, 0 if finite else 1)


def test_no_agent(tmp_path: Path) -> None:
    """Without an agent nothing is raised, and no more than one connection a second is tried."""
    heartbeat = Heartbeat(socket=str(tmp_path / "nobody.sock"))
    spaced(heartbeat, 3)
    end = AgentsEnd(tmp_path / "nobody.sock")
    spaced(heartbeat, 1)
    assert end.messages() == []
    time.sleep(1.0)
    heartbeat.step()
    (message,) = end.messages()
    assert (message.step, message.lost) == (5, 4)
    end.close()


def test_agent_that_comes_and_goes(agents_end: AgentsEnd, tmp_path: Path) -> None:
    """An agent that ends is noticed, and the next one is found."""
    heartbeat = Heartbeat(socket=agents_end.path)
    spaced(heartbeat, 1)
    assert len(agents_end.messages()) == 1
    agents_end.close()
    os.unlink(agents_end.path)
    spaced(heartbeat, 2)
    successor = AgentsEnd(tmp_path / "heartbeat.sock")
    time.sleep(1.05)
    spaced(heartbeat, 1)
    assert [message.step for message in successor.messages()] == [4]
    successor.close()


def test_agent_that_does_not_read(agents_end: AgentsEnd) -> None:
    """When the agent's queue is full messages are lost, counted, and nothing waits."""
    heartbeat = Heartbeat(socket=agents_end.path)
    started = time.monotonic()
    for _ in range(1000):
        heartbeat.enter("other")  # sent at once, whatever the interval
        heartbeat.enter("training")
    assert time.monotonic() - started < 1.0
    taken = len(agents_end.messages())
    assert 50 < taken < 2000
    spaced(heartbeat, 1)
    assert agents_end.messages()[-1].lost == 2000 - taken


@pytest.mark.parametrize("path", ["/proc/nothing/here.sock", "/etc/hostname", "/" + "x" * 200, "relative\udcff.sock"])
def test_impossible_paths(path: str) -> None:
    """A path that cannot be a socket's costs nothing but the heartbeats."""
    heartbeat = Heartbeat(socket=path)
    spaced(heartbeat, 2)


def test_fork(agents_end: AgentsEnd) -> None:
    """A child of fork has a connection of its own, and leaves its parent's alone."""
    heartbeat = Heartbeat(socket=agents_end.path)
    spaced(heartbeat, 1)
    child = os.fork()
    if child == 0:
        spaced(heartbeat, 1)
        os._exit(0)
    os.waitpid(child, 0)
    spaced(heartbeat, 2)
    agents_end.messages()
    assert len(agents_end.connections) == 2


def test_threads(agents_end: AgentsEnd) -> None:
    """Several threads that step at the same time do no harm."""
    heartbeat = Heartbeat(socket=agents_end.path)
    threads = [threading.Thread(target=spaced, args=(heartbeat, 20, 0.001)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not heartbeat.closed
    assert agents_end.messages()


def test_defects_stay_inside(agents_end: AgentsEnd, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong is logged once; the training sees nothing of it, and the heartbeat is over."""
    heartbeat = Heartbeat(socket=agents_end.path)
    heartbeat.communication = lambda: 1 // 0
    with caplog.at_level(logging.WARNING, "dshealthd.training"):
        spaced(heartbeat, 3)
    assert [record.message for record in caplog.records] == ["the heartbeat ends, the training goes on"]
    assert "ZeroDivisionError" in caplog.text
    assert agents_end.messages() == []


def test_what_cannot_be_attached_to(caplog: pytest.LogCaptureFixture) -> None:
    """An engine or optimizer that is none is said by the log, and nothing is raised."""
    with caplog.at_level(logging.WARNING, "dshealthd.training"):
        assert attach(object()).closed
        assert attach(optimizer=object()).closed
    assert "object is no DeepSpeed engine" in caplog.text


def test_attach_to_nothing() -> None:
    """A call that names nothing, or two things, is a mistake in the script."""
    with pytest.raises(TypeError, match="attach"):
        attach()
    with pytest.raises(TypeError, match="attach"):
        attach(object(), optimizer=object())
