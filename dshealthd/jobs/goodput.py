"""Where the time of one rank went, as the agent reads its heartbeats.

Its page is read a few times a second, and the time between two reads belongs to the phase that the
second one shows: right on average, also for phases that are shorter. Own work, waits, input and
unmarked evaluations are what the rank has summed up itself; what is hung is the agent's verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from dshealthd.core import schema
from dshealthd.training.message import MAX_COUNT, MAX_TOTAL, Message, Phase, Totals
from dshealthd.training.report import divide_time

SLACK = 3.0
"""Seconds between two reads beyond which nobody knows the phase in between: pages are read twice a
second."""
RATIO = 1.05
"""Between two step times that are told apart: quantiles are right to 3 %, in 600 steps at most."""
QUANTILES = (0.5, 0.95, 0.99, 1.0)
FEW = 2
"""Steps that a process makes before all of them are measured."""
TRAINING = "training"
"""The part of the time in which it trains, which its own sums divide."""
_NONE = Totals(0, 0, 0.0, 0.0)
_Seconds = Annotated[float, schema.Number(0, MAX_TOTAL)]
_Count = Annotated[int, schema.Integer(0, MAX_COUNT)]
_RankSeconds = Annotated[float, schema.Number(0, 1e15)]
"""Of so many ranks as a job may have."""
_Natural = Annotated[int, schema.Integer()]


@dataclass(slots=True)
class Slowest:
    """The rank of an attempt on one node with the most own work in a step."""

    rank: _Natural
    work_seconds: _RankSeconds
    step_seconds: _RankSeconds
    usual_seconds: _RankSeconds
    """What others of its role have."""
    next_seconds: _RankSeconds
    """The most that any other rank here has."""


@dataclass(slots=True)
class Card:
    """What a node tells of where the time of a job's attempt went; None is unknown."""

    mark: _Natural
    """What its ranks on all nodes share."""
    ranks: Annotated[int, schema.Integer(1)]
    """Their number here."""
    again: bool
    """Whether there was an attempt before it."""
    times: dict[str, _RankSeconds]
    """The seconds of each part, summed over its ranks here."""
    user: _Natural | None = None
    world_size: _Natural | None = None
    first_step: _Count | None = None
    failed: Annotated[float, schema.UNIX_TIME] | None = None
    """When its first rank failed."""
    memory_peak_bytes: _Natural | None = None
    step_seconds: tuple[_RankSeconds, ...] | None = None
    """QUANTILES of step times."""
    slowest: Slowest | None = None


@dataclass(slots=True)
class Goodput:
    """Where the time of one rank's process went, in seconds."""

    at: _Seconds = 0.0
    """Monotonic time of the last read; 0 before the first."""
    before: str = "start"
    """The part of what comes before the end of its first step."""
    spent: dict[str, _Seconds] = field(default_factory=dict)
    part: str = "start"
    """What it spends its time on since its page last changed, and for how long."""
    quiet: _Seconds = 0.0
    first: _Count | None = None
    """Steps at the first read."""
    began: _Count | None = None
    """Steps before this process; None if unknown."""
    reached: _Count = 0
    """Steps that an earlier attempt had made."""
    since: _Count | None = None
    """The step from whose end on it trains, None before that; and its sums there."""
    base: Totals = _NONE
    within: str = TRAINING
    """What it stood still in last; and the seconds, which the next sums will have, where those are
    of a step."""
    stood: _Seconds = 0.0
    step: _Count = 0
    totals: Totals | None = None
    inputs: _Seconds | None = None
    """Seconds that its inputs took since."""
    evaluated: _Seconds = 0.0
    """Seconds that its unmarked evaluations had taken at the last read."""
    role: _Count | None = None
    """The stage of a pipeline."""
    peak: _Natural | None = None
    """Bytes of its device's memory at their highest."""
    steps: dict[int, _Count] = field(default_factory=dict)
    """Number of steps by the logarithm of their time to the base RATIO."""

    def begin(self, age: float, now: float, *, seen: bool) -> None:
        """Begin with a process that is `age` seconds old. What it did before is known only if the
        agent has `seen` it start.
        """
        self.at = now
        self.before = self.part = "start" if seen else "unmeasured"
        self.spent = {self.part: max(age, 0.0)}

    def add(self, message: Message, now: float, *, changed: bool) -> None:
        """Account for the time since the last read of the rank's heartbeat, `changed` or not."""
        elapsed, self.at = max(now - self.at, 0.0) if self.at else 0.0, now
        stands = self.part == "hung"
        if changed and not stands:
            self.part = self._part(message, elapsed)
        self._spend(self.part, elapsed)
        self.quiet += elapsed
        if not changed:
            return
        if stands:
            self.stood += self.quiet if self.within == TRAINING else 0.0
            self.part = self._part(message, elapsed)
        self.quiet = 0.0
        self._evaluate(message.evaluation_seconds or 0.0)
        self._count(message)

    def lengthen(self, seconds: float) -> None:
        """Begin earlier: when the attempt before it had ended."""
        if self.before == "start":
            self._spend("start", seconds)

    def stall(self) -> None:
        """Count its silence as a standstill, from its last heartbeat until the next."""
        if self.part != "hung":
            self._spend(self.part, -self.quiet)
            self._spend("hung", self.quiet)
            self.within, self.part = self.part, "hung"

    def _spend(self, part: str, seconds: float) -> None:
        self.spent[part] = max(self.spent.get(part, 0.0) + seconds, 0.0)

    def _part(self, message: Message, elapsed: float) -> str:
        if self.since is None:
            return self.before
        known = message.phase != Phase.TRAINING and elapsed <= SLACK
        return Phase(message.phase).name.lower() if known else TRAINING

    def _evaluate(self, evaluated: float) -> None:
        """Count the evaluations since the last read as such, but for a standstill in one."""
        if self.first is not None:
            seconds = max(evaluated - self.evaluated, 0.0)
            if seconds >= self.stood:
                seconds, self.stood = seconds - self.stood, 0.0
            seconds = min(seconds, self.spent.get(TRAINING, 0.0))
            if seconds:
                self._spend(TRAINING, -seconds)
                self._spend("evaluation", seconds)
        self.evaluated = evaluated

    def _count(self, message: Message) -> None:
        """Add the steps that a new message tells of."""
        if self.first is None:
            self.first, self.step = message.step, message.step
            self.began = message.step if message.last_seconds is None else None
        made, self.step = message.step - self.step, message.step
        before, sums = self.totals, message.totals
        if sums is not None:
            if before is None:
                self._find_begin(sums)
                made = min(made, self.step - (self.began or 0))
            elif self.stood and sums != before:
                work = sums.work_seconds - before.work_seconds
                wait = sums.wait_seconds - before.wait_seconds
                step, steps, worked, waited = self.base
                if work > wait:
                    worked += self.stood
                else:
                    waited += self.stood
                self.base, self.stood = Totals(step, steps, worked, waited), 0.0
            self.totals = sums
        if message.input_seconds is not None:
            inputs = (self.inputs or 0.0) + message.input_seconds * max(made, 0)
            self.inputs = min(inputs, MAX_TOTAL)  # whatever a process claims
        self.role = message.pipeline_stage
        if message.memory is not None:
            self.peak = max(self.peak or 0, message.memory.peak)
        if self.since is None and (made > 0 or message.last_seconds is not None):
            self._begin_training()
        if made > 0 and message.last_seconds is not None:
            bucket = round(math.log(message.last_seconds, RATIO))
            self.steps[bucket] = min(self.steps.get(bucket, 0) + made, MAX_COUNT)
        if self.repeats and self.step >= self.reached:
            self._spend("repeated", self.spent.pop(TRAINING, 0.0))
            self.since, self.base = self.step, self.totals or _NONE
            self.inputs = None

    def _find_begin(self, sums: Totals) -> None:
        """Tell from its first sums how many steps were made before it."""
        # No clock measures a first step, nor those with a marked pause.
        latest = max(sums.step - sums.steps - 1, 0)
        if self.began is None:
            self.began = latest if latest > FEW else 0
        elif latest < self.began or self.step - self.began > 2 * (sums.steps + FEW):
            # Its first heartbeat came after its first step, or before a checkpoint was loaded.
            self.began = latest

    def _begin_training(self) -> None:
        """Begin at the end of the first step; those that are known by now came before the read."""
        _, steps, worked, waited = self.totals or _NONE
        trained = min(worked + waited, self.spent.get(self.before, 0.0))
        self._spend(self.before, -trained)
        self._spend(TRAINING, trained)
        self.since, self.part = max(self.step - steps, 0), TRAINING

    @property
    def repeats(self) -> bool:
        """Whether it makes steps again that an earlier attempt had made. A count that begins at 0
        does not tell: it may not have been carried on.
        """
        return 0 < (self.began or 0) < self.reached and "repeated" not in self.spent

    def _sums(self) -> Totals | None:
        if self.totals is None:
            return None
        step, steps, work, wait = self.totals
        _, less, worked, waited = self.base
        return Totals(step, steps - less, max(work - worked, 0.0), max(wait - waited, 0.0))

    def times(self, *, alone: bool) -> dict[str, float]:
        """Return the seconds of each part of the rank's time, which add up to its life.

        `alone` is a rank without others.
        """
        found = {part: seconds for part, seconds in self.spent.items() if part != TRAINING}
        training = self.spent.get(TRAINING, 0.0)
        if self.repeats:
            more = {"repeated": training}
        else:
            made = max(self.step - (self.since or 0), 0)
            inputs = self.inputs / made if self.inputs is not None and made else None
            more = divide_time(training, made, self._sums(), inputs, alone=alone)
        return {part: found.get(part, 0.0) + more.get(part, 0.0) for part in found.keys() | more}

    @property
    def per_step(self) -> tuple[float, float] | None:
        """Own work and wait of a step in seconds; None if unknown."""
        sums = self._sums()
        if sums is None or sums.steps <= 0:
            return None
        return sums.work_seconds / sums.steps, sums.wait_seconds / sums.steps


def quantiles(accounts: Iterable[Goodput]) -> tuple[float, ...] | None:
    """Return the step times, in seconds, that QUANTILES of all steps do not exceed."""
    counts: Counter[int] = Counter()
    for account in accounts:
        counts.update(account.steps)
    if not counts:
        return None
    total, below = counts.total(), 0
    found: list[float] = []
    for place, count in sorted(counts.items()):
        below += count
        while len(found) < len(QUANTILES) and below >= QUANTILES[len(found)] * total:
            found.append(RATIO**place)
    return tuple(found)
