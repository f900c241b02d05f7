"""The timer of a step's input, waits and own work, which never waits for a
device.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from dshealthd.training.message import Totals

AVERAGED = 10
"""Steps over which times are averaged."""
SPANS = 2048
"""Most spans of one kind kept for one step on a device; the times of a step with more are
dropped."""
LATE = 16
"""Most steps whose times are awaited."""
SHARE = 0.002
"""The share of a training's time that measuring may take. With the position, some 20 µs a step, a
training of 5 ms steps is slower by about half a percent.
"""
STEP_COST, WAIT_COST = 150e-6, 15e-6
"""Seconds that it takes to measure a step, and each wait in it (`bench.bench_heartbeat`)."""
LEAST = 1e-3
"""The least share of steps that is measured."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""The fractional parts of its multiples are spread more evenly than those of any other number: so
steps chosen by them are as frequent among each second, tenth or hundredth step, whatever is done
there. They are the same in all ranks, whose work is compared.
"""


class Average:
    """A moving average whose first values weigh equally, so that a long first one soon fades."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0
        self._total = 0.0

    @property
    def mean(self) -> float | None:
        """The mean over all steps so far."""
        return self._total / self._count if self._count else None

    def add(self, value: float) -> None:
        """Add a step's value to the moving average."""
        self._count += 1
        self._total += value
        before = value if self.value is None else self.value
        self.value = before + (value - before) / min(self._count, AVERAGED)


class TrimmedAverage:
    """The average of the last steps without the least and the greatest.

    One step in which a process was stopped, saved or logged does not show, and a change shows after
    the second step.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        """None before the third value."""
        self._values: deque[float] = deque(maxlen=AVERAGED)

    def add(self, value: float) -> None:
        """Add a step's value, and drop the oldest of those that are averaged."""
        values = self._values
        values.append(value)
        count = len(values) - 2
        if count > 0:
            # Rounding can make the difference of equal values negative.
            self.value = max((sum(values) - min(values) - max(values)) / count, 0.0)


class Spans:
    """The spans of one kind within a step: their sum on the host, or pairs of marks on a device."""

    __slots__ = ("_marks", "_seconds", "count")

    def __init__(self) -> None:
        self.count = 0
        self._seconds: float | None = 0.0
        """None once a span cannot be known."""
        self._marks: list[tuple[Any, Any]] = []

    def add(self, begin: Any, end: Any) -> None:
        """Add the span between two marks within a step."""
        self.count += 1
        if self._seconds is None:
            return
        if begin is None or end is None:
            self.drop()
        elif isinstance(end, float):
            self._seconds += max(end - begin, 0.0)
        elif self.count > SPANS:
            self.drop()
        else:
            self._marks.append((begin, end))

    def extend(self, more: Spans) -> None:
        """Add all of a step's spans of another kind to these."""
        self.count += more.count
        if self._seconds is None or more._seconds is None:
            self.drop()
            return
        self._seconds += more._seconds
        self._marks += more._marks

    def drop(self) -> None:
        """Make the sum of this step's spans unknown."""
        self._seconds = None
        self._marks.clear()

    def has_come(self) -> bool:
        """Return whether the device has reached all marks of the spans; at once on the CPU."""
        return all(mark.query() for span in self._marks for mark in span)

    def seconds(self) -> float | None:
        """Return the sum of a step's spans; None if one is unknown."""
        total = self._seconds
        if total is None:
            return None
        for begin, end in self._marks:
            try:
                total += max(float(begin.elapsed_time(end)), 0.0) / 1000.0
            except (RuntimeError, ValueError, ArithmeticError):  # events of two devices
                return None
        return total


class Lap:
    """The spans of one step."""

    __slots__ = (
        "began", "evaluation", "evaluation_waits", "input_waits", "inputs", "step", "steps",
        "waits", "whole",
    )  # fmt: skip

    def __init__(self, began: Any) -> None:
        self.began = began
        """The mark of the end of the step before."""
        self.steps = 1
        """How many steps it stands for, known at its end."""
        self.step = 0
        """Its number, known at its end."""
        self.inputs = Spans()
        self.input_waits = Spans()
        """Waits for other ranks within the inputs."""
        self.evaluation = Spans()
        """What is no part of it."""
        self.evaluation_waits = Spans()
        self.waits = Spans()
        self.whole = Spans()


class StepTimer:
    """A timer of the parts of a step, averaged over the last steps.

    On the CPU a mark is the host's clock. On a CUDA device the host runs ahead and would only
    measure launching. There a mark is an event in the current stream, whose time is read at a
    later step, when the device has reached it. So the input time is the time for which the device
    had nothing to do, and the host's waits for results do not count as input. Nothing is known for
    other devices.

    A wait for other ranks between two steps, such as in a barrier, is no input. It may be that for
    one of them.

    A step is what this rank did itself and what it waited for other ranks. A step in which no wait
    was seen has neither: a job whose waits cannot be seen has unknown ones, not none. Its time is
    added to the totals with the next step that has one: ranks that exchange every tenth step work
    by themselves in the other nine.

    Short steps are not all measured. What the next one takes does not depend on how many were not:
    so a measured step counts for those before it as well, and totals are right on average.
    """

    def __init__(self) -> None:
        self.input = Average()
        self.wait = TrimmedAverage()
        self.work = TrimmedAverage()
        self.totals: Totals | None = None
        """Sums over all measured steps, with those in which a process stood still."""
        self.share = 1.0
        """The share of steps that are measured."""
        self._waits = Average()
        """Number of waits in a step."""
        self._unseen = 0, 0.0
        """Number and seconds of the steps since the last one in which a wait was seen."""
        self._lap = Lap(None)
        self._late: deque[Lap] = deque(maxlen=LATE)
        self.device: str | None = None
        """The type of the model's device; None until it is known."""
        self._cuda: Any = None
        self._ended: Any = None
        self._input_waits = Spans()
        """Waits since the beginning of an input span that has not ended."""

    def on(self, device: str, cuda: Any) -> None:
        """Set the model's device type and start measuring; `cuda` is `torch.cuda`."""
        self.device, self._cuda = device, cuda

    def input_ended(self, now: float) -> None:
        """End the timing of input: a forward pass is about to begin."""
        if self._ended is not None:
            self._lap.inputs.add(self._ended, self.mark(now))
            self._lap.input_waits.extend(self._input_waits)
        self.input_dropped()

    def waited(self, begin: Any, now: float) -> None:
        """Time a wait for other ranks that began at a mark and ends now."""
        end = self.mark(now)
        self._lap.waits.add(begin, end)
        if self._ended is not None:
            self._input_waits.add(begin, end)

    def evaluated(self, now: float) -> None:
        """Time an evaluation between two steps that ends now, and begin to time input anew."""
        if self._ended is not None:
            mark, waits = self.mark(now), self._input_waits
            self._lap.evaluation.add(self._ended, mark)
            self._lap.evaluation_waits.extend(waits)
            self.micro_step_ended(now)

    def interrupted(self) -> None:
        """Drop this step's input and the step itself: the pause is neither a wait nor work."""
        self.input_dropped()
        self._lap.inputs.drop()
        self._lap.whole.drop()

    def input_dropped(self) -> None:
        """End the timing of input without a result: something else than input comes next."""
        self._ended = None
        if self._input_waits.count:
            self._input_waits = Spans()

    def micro_step_ended(self, now: float) -> None:
        """Begin to time input within the same step."""
        self.input_dropped()
        self._ended = self.mark(now)

    def step_ended(
        self, now: float, step: int = 0, steps: int = 1, seconds: float | None = None
    ) -> None:
        """End the timed step of this number, and begin the next one and its input.

        It stands for so many `steps`; a usual one takes `seconds`.
        """
        mark, lap = self.mark(now), self._lap
        lap.step, lap.steps = step, steps
        if lap.began is not None:
            lap.whole.add(lap.began, mark)
        self._waits.add(lap.waits.count)
        if seconds is not None:
            cost = STEP_COST + WAIT_COST * (self._waits.value or 0.0)
            self.share = max(SHARE * seconds / cost, LEAST)
        self._begin(mark)
        if self.device == "cpu":
            self._settle(lap)
            return
        self._late.append(lap)
        while self._late and self._has_come(self._late[0]):
            self._settle(self._late.popleft())

    def next_measured(self, step: int) -> int:
        """Return the number of the next step that is measured: this one, or a later one."""
        while step * GOLDEN % 1.0 >= self.share:
            step += 1
        return step

    def step_began(self, now: float) -> None:
        """Begin to time a step after one that was not measured."""
        self._begin(self.mark(now))

    def _begin(self, mark: Any) -> None:
        self.input_dropped()
        self._ended, self._lap = mark, Lap(mark)

    def mark(self, now: float) -> Any:
        """Return a mark to time from: the clock, or a CUDA event; None if none can be made."""
        if self.device == "cpu":
            return now
        if self.device != "cuda":
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _has_come(lap: Lap) -> bool:
        return lap.whole.has_come() and lap.inputs.has_come() and lap.waits.has_come()

    def _settle(self, lap: Lap) -> None:
        inputs, waited = lap.inputs.seconds(), lap.input_waits.seconds()
        if lap.inputs.count and inputs is not None and waited is not None:
            self.input.add(max(inputs - waited, 0.0))
        evaluation, less = lap.evaluation.seconds(), lap.evaluation_waits.seconds()
        wait, whole = lap.waits.seconds(), lap.whole.seconds() if lap.whole.count else None
        if whole is None or wait is None or evaluation is None or less is None:
            return
        whole = max(whole - evaluation, 0.0)
        if lap.waits.count > lap.evaluation_waits.count:
            self._measured(lap, whole, min(max(wait - less, 0.0), whole))
        else:
            steps, seconds = self._unseen
            self._unseen = steps + lap.steps, seconds + lap.steps * whole

    def _measured(self, lap: Lap, whole: float, wait: float) -> None:
        """Add a timed step whose wait is known to averages and totals."""
        work = whole - wait
        self.wait.add(wait)
        self.work.add(work)
        (unseen, seconds), self._unseen = self._unseen, (0, 0.0)
        _, steps, worked, waited = self.totals or Totals(0, 0, 0.0, 0.0)
        self.totals = Totals(
            lap.step,
            steps + unseen + lap.steps,
            worked + seconds + lap.steps * work,
            waited + lap.steps * wait,
        )
