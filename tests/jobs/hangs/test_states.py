"""What one rank's state says, with each number on either side."""

from __future__ import annotations

import pytest

from dshealthd.jobs.hangs.states import Work, operation, position
from dshealthd.linux.activity import ThreadState
from dshealthd.training.message import Phase, StepStage
from tests.jobs.standstills import rank_state

FORWARD, BACKWARD = StepStage.FORWARD, StepStage.BACKWARD


@pytest.mark.parametrize(
    ("word", "name"),
    [
        (0, ""),
        (1, "broadcast"),
        (20, "reduce_scatter"),
        (21, "other"),
        (3 * 256, ""),
        (3 * 256 + 2, "all_reduce in group 3"),
    ],
)
def test_operation(word: int, name: str) -> None:
    """One more than its type, with the mark of its group in the upper byte."""
    assert operation(word) == name


@pytest.mark.parametrize(
    ("stage", "forward_pass", "forward_passes", "thirds"),
    [
        (StepStage.UNKNOWN, 0, 0, 0.0),
        (StepStage.INPUT, 0, 0, 0.0),
        (FORWARD, 0, 0, 1.0),
        (BACKWARD, 0, 0, 2.0),
        # One pass: as without its number.
        (StepStage.INPUT, 0, 1, 0.0),
        (FORWARD, 1, 1, 1.0),
        (BACKWARD, 1, 1, 2.0),
        # Of four passes, those before the last share the first third.
        (StepStage.INPUT, 0, 4, 0.0),
        (FORWARD, 1, 4, 1 / 12),
        (BACKWARD, 1, 4, 2 / 12),
        (StepStage.INPUT, 1, 4, 3 / 12),
        (BACKWARD, 3, 4, 8 / 12),
        (StepStage.INPUT, 3, 4, 9 / 12),
        (FORWARD, 4, 4, 1.0),
        (BACKWARD, 4, 4, 2.0),
        (FORWARD, 9, 4, 1.0),
    ],
)
def test_position_in_a_step(
    stage: StepStage, forward_pass: int, forward_passes: int, thirds: float
) -> None:
    """In thirds of the next step."""
    rank = rank_state(0.0, stage=stage, forward_pass=forward_pass, forward_passes=forward_passes)
    assert 3 * (position(rank) - 50) == pytest.approx(thirds)


SEEN = Work(still=frozenset({0}))
WAITS = Work(still=frozenset({0}), waits=frozenset({0}))


@pytest.mark.parametrize(
    ("fields", "seen", "computes"),
    [
        ({"cpu": 0.5}, Work(), True),
        ({"cpu": 0.49}, Work(), False),
        ({"cpu": None}, Work(), False),
        ({"cpu": 1.0, "on_gpu": True}, Work(), False),
        ({"cpu": 1.0, "on_gpu": True}, SEEN, True),
        ({"cpu": 1.0, "on_gpu": True}, WAITS, False),
        ({"cpu": 1.0}, WAITS, False),
    ],
)
def test_at_work(fields: dict[str, object], seen: Work, *, computes: bool) -> None:
    """From half of a core on, unless the host may spin for its GPU."""
    assert rank_state(0.0, **fields).computes(seen) is computes


@pytest.mark.parametrize(
    ("fields", "seen", "idle"),
    [
        ({"thread_cpu": 0.009}, Work(), True),
        ({"thread_cpu": 0.01}, Work(), False),
        ({"thread_cpu": None}, Work(), False),
        ({"thread_cpu": 0.0, "cpu": 0.5}, Work(), False),
        ({"thread_cpu": 0.0, "on_gpu": True}, Work(), False),
        ({"thread_cpu": 0.0, "on_gpu": True}, SEEN, True),
        ({"thread_cpu": 1.0, "cpu": 1.0, "on_gpu": True}, WAITS, True),
    ],
)
def test_doing_nothing(fields: dict[str, object], seen: Work, *, idle: bool) -> None:
    """Its thread takes less than a hundredth of a core, or its GPU waits in a kernel."""
    assert rank_state(0.0, **fields).is_idle(seen) is idle


BETWEEN = {"stage": StepStage.INPUT, "thread_cpu": 0.0, "collective": "barrier"}


@pytest.mark.parametrize(
    ("fields", "seen", "found"),
    [
        ({"stage": FORWARD, "thread_cpu": 0.0}, Work(), "step"),
        ({"stage": BACKWARD, "thread_cpu": 0.0}, Work(), "step"),
        ({"stage": BACKWARD, "thread_cpu": 0.0, "phase": Phase.EVALUATION}, Work(), ""),
        ({"stage": BACKWARD, "thread_cpu": 0.5}, Work(), ""),
        ({**BETWEEN, "collective_for": 45.0}, Work(), ""),
        ({**BETWEEN, "collective_for": 45.1}, Work(), "barrier"),
        ({**BETWEEN, "collective_for": 0.0}, WAITS, "kernel"),
    ],
)
def test_waiting_for_others(fields: dict[str, object], seen: Work, found: str) -> None:
    """In a step, in a kernel, or for long enough in a collective between two steps."""
    assert rank_state(0.0, **fields).waits_in(seen, 45.0) == found


@pytest.mark.parametrize(
    ("state", "stopped"),
    [(ThreadState.STOPPED, True), (ThreadState.TRACED, True), (ThreadState.SLEEPING, False)],
)
def test_stopped(state: ThreadState, *, stopped: bool) -> None:
    """By a signal or a debugger."""
    assert rank_state(0.0, state=state).stopped is stopped


@pytest.mark.parametrize(("silence", "overdue"), [(30.0, False), (30.1, True)])
def test_overdue(silence: float, *, overdue: bool) -> None:
    """Beyond what is usual."""
    assert rank_state(silence).overdue is overdue
