"""What is usual for a rank, learnt from its heartbeats.

No healthy history is ever overdue, and a stop is found in bounded time.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.hangs.silence import SilenceBaseline
from dshealthd.training.message import Phase

FIRST = 100.0
FIRST_STEPS = 10
FLOOR = 30.0
LONGEST = 600.0
MARGIN = 2.0

STEP_SECONDS = st.floats(0.001, 120.0)


def trained(seconds: float, steps: int = 3 * FIRST_STEPS) -> tuple[SilenceBaseline, float, int]:
    """Return the pace of a rank after so many steps of this length, with the time and step it is
    at.
    """
    baseline, now = SilenceBaseline.begin(0.0, 0, Phase.TRAINING), 0.0
    for step in range(1, steps + 1):
        now += seconds
        baseline.record(now, step, Phase.TRAINING)
    return baseline, now, steps


def overdue(baseline: SilenceBaseline, at: float) -> float:
    """Return the seconds by which the silence exceeds its bound at a time."""
    return max(0.0, baseline.silence(at) - baseline.bound)


@given(
    seconds=STEP_SECONDS,
    jitter=st.lists(st.floats(0.75, 1.25), min_size=60, max_size=60),
    every=st.integers(1, 20),
    pause=st.floats(0.0, 0.9),
    first=st.floats(0.0, FIRST),
)
def test_healthy_history_is_never_overdue(
    seconds: float, jitter: list[float], every: int, pause: float, first: float
) -> None:
    """Steps that vary by a quarter, a first one that compiles, and unmarked pauses short of the
    bound are never taken for a stop; of the first steps, those that are not longer than usual ones.
    """
    baseline, now = SilenceBaseline.begin(0.0, 0, Phase.TRAINING), 0.0
    pauses = pause * (max(FLOOR, MARGIN * 0.75 * seconds) - 1.25 * seconds)
    for step, factor in enumerate(jitter, 1):
        silence = (
            first
            if step == 1
            else seconds * factor + (max(pauses, 0.0) if step % every == 0 else 0.0)
        )
        assert overdue(baseline, now + silence) == 0.0 or (step <= FIRST_STEPS and silence > FIRST)
        now += silence
        baseline.record(now, step, Phase.TRAINING)


@given(seconds=STEP_SECONDS, pause=st.floats(0.0, LONGEST), factor=st.floats(0.0, 1.9))
def test_a_pause_that_came_again_is_usual(seconds: float, pause: float, factor: float) -> None:
    """An unmarked pause of up to ten minutes that has come twice may come once more, and be nearly
    twice as long, however long it was.
    """
    baseline, now, step = trained(seconds)
    for _ in range(2):
        now, step = now + pause, step + 1
        baseline.record(now, step, Phase.TRAINING)
    assert overdue(baseline, now + factor * pause) <= 1e-6


def test_how_long_a_marked_phase_is_usual_without_work() -> None:
    """A checkpoint that shows nothing is given less time, if none has taken as long; an evaluation
    may be that of a service.
    """
    baseline, now, step = trained(1.0)
    baseline.record(now, step, Phase.EVALUATION)
    assert baseline.idle_bound == baseline.bound == 1800.0
    baseline.record(now, step, Phase.CHECKPOINT)
    assert (baseline.idle_bound, baseline.bound) == (100.0, 1800.0)
    baseline.record(now + 60.0, step, Phase.TRAINING)
    assert baseline.idle_bound == baseline.bound
    baseline.record(now + 61.0, step + 1, Phase.CHECKPOINT)
    assert baseline.idle_bound == pytest.approx(240.0, rel=0.01)
    assert baseline.bound == 300.0


def test_a_pause_that_was_recognized_teaches_nothing() -> None:
    """A silence that was seen to be a pause does not make later stops invisible for minutes."""
    baseline, now, step = trained(0.5)
    baseline.record(now + 90.0, step + 1, Phase.TRAINING, learn=False)
    assert baseline.bound == 30.0
    baseline.record(now + 110.0, step + 2, Phase.TRAINING)
    assert baseline.bound == 40.0


@given(seconds=STEP_SECONDS, age=st.floats(0.0, 3600.0))
def test_a_stop_is_found(seconds: float, age: float) -> None:
    """A rank that stops after steady steps is overdue once the bound has passed, which is twice its
    step or the floor, and not before.
    """
    baseline, now, _ = trained(seconds)
    bound = max(FLOOR, MARGIN * seconds)
    assert abs(baseline.bound - bound) < 1e-6 * bound
    assert abs(overdue(baseline, now + age) - max(0.0, age - bound)) < 1e-3


def test_nothing_is_known_of_the_first_steps() -> None:
    """While a training compiles and warms up, more silence is usual."""
    baseline, now, _ = trained(1.0, 9)
    assert baseline.bound == 100.0
    assert overdue(baseline, now + 99.0) == 0.0
    assert overdue(baseline, now + 105.0) == 5.0
    baseline, *_ = trained(1.0, 10)
    assert baseline.bound == 30.0
    baseline = SilenceBaseline.begin(0.0, 0, Phase.TRAINING)
    for step in range(1, 11):
        baseline.record(90.0 + step, step, Phase.TRAINING)
    assert baseline.bound == 30.0


def test_fast_steps() -> None:
    """Of steps that are so fast that the second heartbeat heard is past the first steps, the mean
    is known at once.
    """
    baseline = SilenceBaseline.begin(0.0, 5, Phase.TRAINING)
    baseline.record(2.0, 5 + FIRST_STEPS, Phase.TRAINING)
    assert baseline.bound == 30.0
    slow = SilenceBaseline.begin(0.0, 5, Phase.TRAINING)
    slow.record(1000.0, 5 + FIRST_STEPS, Phase.TRAINING)
    assert slow.bound == 200.0


def test_slow_first_steps_are_not_learnt() -> None:
    """A compilation of minutes in the first steps does not make later stops invisible for
    minutes.
    """
    baseline = SilenceBaseline.begin(0.0, 0, Phase.TRAINING)
    for step in range(1, 30):
        baseline.record(500.0 + step, step, Phase.TRAINING)
    assert baseline.bound == 30.0


def test_a_hang_that_ended_does_not_hide_the_next() -> None:
    """One silence beyond the bound changes nothing."""
    baseline, now, step = trained(0.5)
    baseline.record(now + 5 * 3600.0, step + 1, Phase.TRAINING)
    assert baseline.bound == 30.0
    baseline.record(now + 10 * 3600.0, step + 2, Phase.TRAINING)
    assert baseline.bound == 1200.0
    baseline, now, step = trained(0.5)
    baseline.record(now + 90.0, step + 1, Phase.TRAINING)
    baseline.record(now + 140.0, step + 2, Phase.TRAINING)
    assert baseline.bound == 100.0


def test_a_hang_of_slow_steps() -> None:
    """Where nothing but the mean of the first steps is known, a hang does not replace it."""
    baseline = SilenceBaseline.begin(0.0, 5, Phase.TRAINING)
    baseline.record(1000.0, 5 + FIRST_STEPS, Phase.TRAINING)
    baseline.record(1500.0, 6 + FIRST_STEPS, Phase.TRAINING)
    assert baseline.bound > 200.0


@pytest.mark.parametrize(("hours", "bound"), [(6, 282.8), (12, 200.0), (24, 100.0), (120, 40.0)])
def test_a_long_silence_is_forgotten(hours: float, bound: float) -> None:
    """What has not come again counts for half as much after half a day, until others are longer."""
    baseline, now, step = trained(0.5)
    for _ in range(2):
        now, step = now + 200.0, step + 1
        baseline.record(now, step, Phase.TRAINING)
    for _ in range(round(hours * 3600.0 / 20.0)):
        now, step = now + 20.0, step + 1
        baseline.record(now, step, Phase.TRAINING)
    assert baseline.bound == pytest.approx(bound, rel=0.001)


def test_a_marked_phase_has_a_range_of_its_own() -> None:
    """A marked evaluation is granted half an hour at first, then by what it took."""
    baseline, now, step = trained(0.5)
    baseline.record(now + 0.1, step, Phase.EVALUATION)
    assert baseline.bound == 1800.0
    baseline.record(now + 200.1, step, Phase.TRAINING)
    assert baseline.bound == 30.0
    baseline.record(now + 201.0, step, Phase.EVALUATION)
    assert baseline.bound == pytest.approx(800.0, rel=1e-4)
    baseline.record(now + 202.0, step, Phase.CHECKPOINT)
    assert baseline.bound == 1800.0


def test_going_back_to_a_checkpoint() -> None:
    """A program that loads an older checkpoint and goes on from there is granted its first steps
    anew.
    """
    baseline, now, _ = trained(0.5)
    baseline.record(now + 1.0, 3, Phase.TRAINING)
    assert baseline.bound == 100.0


def test_the_floor_is_an_option() -> None:
    """Where trainings have unmarked pauses, all may be granted more."""
    baseline = SilenceBaseline.begin(0.0, 0, Phase.TRAINING, floor=120.0)
    for step in range(1, 30):
        baseline.record(float(step), step, Phase.TRAINING)
    assert baseline.bound == 120.0
