"""Where the time of a rank went, against a clock that the test keeps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from dshealthd.core import schema
from dshealthd.core.schema import SchemaError
from dshealthd.jobs.goodput import Goodput, quantiles
from dshealthd.training.message import (
    MAX_COUNT,
    MAX_MEMORY,
    MAX_TOTAL,
    DeviceMemory,
    Message,
    Phase,
    Totals,
)

FORM = schema.of(Goodput)
READ = 0.25
"""Seconds between two reads of a page."""


class Rank:
    """A rank whose steps take what the test says, its page, and the reader of that."""

    def __init__(self, age: float = 10.0, first: int = 0, *, seen: bool = True) -> None:
        self.clock: defaultdict[str, float] = defaultdict(float, start=age)
        self.now = self.due = 1000.0
        self.first = self.step = first
        self.message = Message(first, self.now)
        self.read: Message | None = None
        self.totals: Totals | None = None
        self.evaluated = 0.0
        self.goodput = Goodput()
        self.goodput.begin(age, self.now, seen=seen)

    def spend(self, part: str, seconds: float) -> None:
        """Let time pass, in which the agent reads."""
        end = self.now + seconds
        self.clock[part] += seconds
        while self.due <= end:
            changed, self.read = self.message is not self.read, self.message
            self.goodput.add(self.message, self.due, changed=changed)
            self.due += READ
        self.now = end

    def pause(self, phase: Phase, seconds: float) -> None:
        """Spend time in a marked phase."""
        self.message = self.message._replace(phase=phase, sent=self.now)
        self.spend(phase.name.lower(), seconds)
        self.message = self.message._replace(phase=Phase.TRAINING, sent=self.now)

    def evaluate(self, seconds: float) -> None:
        """Evaluate unmarked: the next message has the time."""
        self.spend("evaluation", seconds)
        self.evaluated += seconds

    def steps(self, count: int, work: float, wait: float, inputs: float | None = None) -> None:
        """Make steps. The first of a process is measured by nothing."""
        for _ in range(count):
            begun = self.step > self.first
            for part, seconds in (("input", inputs or 0.0), ("work", work), ("wait", wait)):
                self.spend(part if begun else "start", seconds)
            self.step += 1
            if begun:
                _, steps, worked, waited = self.totals or Totals(0, 0, 0.0, 0.0)
                own = work + (inputs or 0.0)
                self.totals = Totals(self.step, steps + 1, worked + own, waited + wait)
            self.message = Message(
                self.step,
                self.now,
                last_seconds=work + wait + (inputs or 0.0) if begun else None,
                mean_seconds=work + wait + (inputs or 0.0) if begun else None,
                input_seconds=inputs if begun else None,
                totals=self.totals,
                memory=DeviceMemory(1, 2, (3 << 30) - self.step),  # begun anew
                evaluation_seconds=self.evaluated or None,
            )

    def shares(self) -> dict[str, float]:
        """Return the share of each part, which add up to one."""
        times = self.goodput.times(alone=False)
        assert sum(times.values()) == pytest.approx(self.goodput.at - 1000.0 + 10.0, abs=1e-6)
        return {part: seconds / sum(times.values()) for part, seconds in times.items()}


def check(rank: Rank, parts: Iterable[str], within: float = 0.03) -> None:
    """Require the shares that the rank's own clock says."""
    whole = sum(rank.clock.values())
    shares = rank.shares()
    for part in parts:
        assert shares.get(part, 0.0) == pytest.approx(rank.clock[part] / whole, abs=within), part


PARTS = ("start", "work", "wait", "input", "checkpoint", "evaluation", "hung", "unmeasured")


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0, 7.0])
def test_shares_are_those_of_the_ranks_clock(scale: float) -> None:
    """Whether steps are shorter than the time between two reads or longer."""
    rank = Rank()
    for _ in range(20):
        rank.steps(25, 0.5 * scale, 0.3 * scale, 0.2 * scale)
        rank.pause(Phase.CHECKPOINT, 3 * scale)
        rank.pause(Phase.EVALUATION, 1 * scale)
    check(rank, PARTS)
    assert rank.goodput.began == 0


def test_steps_with_a_pause_count_as_the_others() -> None:
    """Their parts are not measured; half of all steps here."""
    rank = Rank()
    for _ in range(100):
        rank.steps(1, 1.0, 0.5)
        before = rank.totals
        rank.steps(1, 1.0, 0.5)
        if before is not None:
            rank.totals = before._replace(step=rank.step)
            rank.message = rank.message._replace(totals=rank.totals)
        rank.pause(Phase.CHECKPOINT, 1.0)
    check(rank, PARTS)


def test_a_standstill_is_no_wait() -> None:
    """From the last heartbeat on, also of a rank that waits in a collective meanwhile, and in a
    marked phase; the sums of the step in which it stood contain it.
    """
    rank = Rank()
    rank.steps(100, 0.6, 0.4)
    rank.spend("hung", 50.0)
    rank.goodput.stall()
    rank.spend("hung", 50.0)
    assert rank.totals is not None
    rank.totals = rank.totals._replace(wait_seconds=rank.totals.wait_seconds + 100.0)
    rank.steps(100, 0.6, 0.4)
    check(rank, PARTS)
    rank.message = rank.message._replace(phase=Phase.CHECKPOINT, sent=rank.now)
    rank.spend("hung", 60.0)
    rank.goodput.stall()
    rank.spend("hung", 10.0)
    rank.steps(50, 0.6, 0.4)
    check(rank, PARTS)


def test_evaluations_that_nobody_marked() -> None:
    """Their time is what the rank sums up; beside marked ones, and with a standstill within."""
    rank = Rank()
    for _ in range(20):
        rank.steps(25, 0.1, 0.05, 0.05)
        rank.evaluate(2.0)
        rank.pause(Phase.EVALUATION, 1.0)
    check(rank, PARTS, within=0.02)
    rank.spend("hung", 50.0)
    rank.goodput.stall()
    rank.spend("hung", 50.0)
    rank.evaluated += 100.0
    rank.evaluate(5.0)
    rank.steps(50, 0.1, 0.05, 0.05)
    check(rank, PARTS, within=0.02)
    late = Rank(seen=False)
    late.evaluated = 1000.0
    late.steps(10, 1.0, 0.0)
    assert late.shares().get("evaluation", 0.0) == 0.0  # before anybody watched


def test_where_a_process_begins() -> None:
    """That of a first message that knows no duration has made one step or none; sums tell later."""
    for first, began in ((0, 0), (40, 40)):
        rank = Rank(first=first)
        rank.step += 1
        rank.message = Message(rank.step, rank.now)  # it is read only after its first step
        rank.spend("start", 1.0)
        assert rank.goodput.began == first + 1
        rank.steps(5, 1.0, 0.5)
        rank.spend("work", 1.0)
        assert rank.goodput.began == began


@pytest.mark.parametrize(("began", "step", "steps", "found"), [
    (None, 5, 2, 0),
    (None, 6, 2, 3),
    (0, 14, 5, 0),
    (0, 15, 5, 9),
])  # fmt: skip
def test_steps_that_nobody_measured(began: int | None, step: int, steps: int, found: int) -> None:
    """Two, and half of the others, may be this process's; more were made before it."""
    goodput = Goodput(began=began, step=step)
    goodput._find_begin(Totals(step, steps, 0.0, 0.0))
    assert goodput.began == found


@pytest.mark.parametrize(("elapsed", "part"), [(2.9, "checkpoint"), (3.1, "training")])
def test_a_phase_that_began_in_a_gap(elapsed: float, part: str) -> None:
    """Where pages were not read for seconds nobody knows when it began."""
    rank = Rank()
    rank.steps(10, 0.5, 0.5)
    rank.spend("work", 1.0)
    saves = rank.message._replace(phase=Phase.CHECKPOINT)
    rank.goodput.add(saves, rank.goodput.at + elapsed, changed=True)
    assert rank.goodput.part == part


def test_what_is_not_measured_is_said() -> None:
    """Without waits that are seen, own work is not known but of a rank without others; a rank that
    was watched late has an unknown beginning.
    """
    rank = Rank()
    rank.steps(50, 1.0, 0.0)
    rank.goodput.totals = None
    times = rank.goodput.times(alone=False)
    assert times["unmeasured"] == pytest.approx(49.0, abs=0.5)
    assert not {"work", "wait", "input"} & times.keys()
    assert rank.goodput.times(alone=True)["work"] == pytest.approx(49.0, abs=0.5)
    late = Rank(seen=False)
    late.steps(10, 1.0, 0.0)
    assert "start" not in late.goodput.times(alone=False)


def test_steps_that_an_earlier_attempt_had_made() -> None:
    """They are made again; a count that begins at 0 does not tell whether they are."""
    rank = Rank(first=100)
    rank.goodput.reached = 150
    rank.steps(25, 0.5, 0.5)
    assert rank.shares()["repeated"] == pytest.approx(24 / 34, abs=0.03)
    rank.steps(25, 0.5, 0.5)
    rank.steps(50, 0.8, 0.2)
    shares = rank.shares()
    assert rank.goodput.began == 100
    assert shares["repeated"] == pytest.approx(49 / 109, abs=0.03)
    assert shares["work"] == pytest.approx(0.8 * 50 / 109, abs=0.03)
    for first in (0, 150):
        again = Rank(first=first)
        again.goodput.reached = 150
        again.steps(100, 0.8, 0.2)
        assert "repeated" not in again.shares()


def test_a_checkpoint_that_is_loaded_after_the_first_heartbeat() -> None:
    """The steps that it counts are not this process's."""
    rank = Rank()
    rank.spend("start", 1.0)
    rank.first = rank.step = 900
    rank.steps(10, 0.5, 0.5)
    rank.spend("work", 0.5)
    assert rank.goodput.began == 900
    assert sum(rank.goodput.steps.values()) == 9


def test_step_times() -> None:
    """Quantiles of all steps of all ranks, to 3 %; one slow step in fifty is the longest."""
    ranks = [Rank(), Rank()]
    for rank in ranks:
        rank.steps(49, 0.6, 0.4)
        rank.steps(45, 1.2, 0.8)
        rank.steps(5, 2.0, 1.0)
        rank.steps(2, 3.0, 1.0)
        rank.spend("work", 0.5)
    found = quantiles(rank.goodput for rank in ranks)
    assert found == pytest.approx([2.0, 3.0, 4.0, 4.0], rel=0.03)
    assert quantiles([Goodput()]) is None
    assert ranks[0].goodput.peak == (3 << 30) - 1


def test_it_outlives_the_agent() -> None:
    """An account goes on as it was; the time without an agent is that of the rank's own sums."""
    rank = Rank()
    rank.steps(50, 0.6, 0.4, 0.2)
    rank.pause(Phase.CHECKPOINT, 5.0)
    made = json.loads(json.dumps(FORM.write(rank.goodput)))
    rank.goodput = Goodput()
    rank.steps(10, 0.6, 0.4, 0.2)
    rank.goodput = FORM.read(made)
    rank.steps(50, 0.6, 0.4, 0.2)
    check(rank, PARTS)
    several: list[Any] = [None, [], made | {"part": 1}, made | {"spent": {"work": -1}}]
    for broken in several:
        with pytest.raises(SchemaError):
            FORM.read(broken)
    for name, value in (("steps", {"x": 1}), ("totals", [1]), ("at", "1"), ("more", 1)):
        with pytest.raises(SchemaError):
            FORM.read(made | {name: value})


def test_whatever_a_process_claims_can_be_kept() -> None:
    """What no training has, again and again: the account is read again, and can be shown."""
    made, now = Goodput(), 1000.0
    made.begin(5.0, now, seen=True)
    for step in (0, MAX_COUNT, 0, MAX_COUNT, 5):
        for steps in (MAX_COUNT, 0):
            now += READ
            totals = Totals(step, steps, MAX_TOTAL, MAX_TOTAL)
            memory = DeviceMemory(0, 0, MAX_MEMORY)
            known = Message(step, now, totals=totals, memory=memory, input_seconds=1e7)
            made.add(known._replace(last_seconds=1e7, mean_seconds=1e-6), now, changed=True)
            made.stall()
            now += 1e4
            made.add(known, now, changed=False)
    again = FORM.read(json.loads(json.dumps(FORM.write(made))))
    assert again == made
    assert sum(again.times(alone=False).values()) == pytest.approx(now - 1000.0 + 5.0)
    assert quantiles([again, made]) is not None
