"""How far a process is, which the agent is told at each step and each stage of one.

A step leaves nothing of this code in the processor's caches: each function that is called, and each
object and name that is looked up, costs a training about a microsecond. So what each step and stage
touches is in slots of one object, and the position is two stores to memory.
"""

from __future__ import annotations

from time import monotonic

from dshealthd.training.message import MAX_PASSES, PASS_BIT, STEP_BIT, StepStage

# Members of an enumeration cost more to read, and to add, than all the rest.
INPUT, FORWARD, BACKWARD = int(StepStage.INPUT), int(StepStage.FORWARD), int(StepStage.BACKWARD)


class Position:
    """How far the host is in its training, in memory that the agent reads.

    It fails for no number of steps up to `message.MAX_COUNT`.
    """

    __slots__ = (
        "_brief_until", "_due", "_ended", "_passes", "_times", "_usual_passes", "_words",
        "measures", "stage", "steps",
    )  # fmt: skip

    def __init__(self, steps: int, words: memoryview[int], times: memoryview[float]) -> None:
        """Begin after so many steps; `words` and `times` are views of `message.POSITION`.

        A store to a view is whole at once, and costs a third of what `Struct.pack_into` does.
        """
        self.steps = steps
        """Optimizer steps so far."""
        self.stage = 0
        """How far the host is in the present step, a `StepStage`."""
        self.measures = True
        """Whether the parts of this step are measured."""
        self._words, self._times = words, times
        self._passes = 0
        """Forward passes of this step so far."""
        self._usual_passes = 0
        """Those of a usual step."""
        self._brief_until = 0
        """The last step at whose end nothing is told but the position."""
        self._due = 0.0
        """Monotonic time from which on the next step is told, whichever it is."""
        self._ended: float | None = None
        """Monotonic time at which the last step ended."""

    def move(self, stage: int) -> float:
        """Move the position to a stage that the host has come to; return monotonic time.

        The stages of most steps have this inline: a call costs them as much again.
        """
        self.stage = stage
        self._words[0] = self.steps << STEP_BIT | (self._passes & MAX_PASSES) << PASS_BIT | stage
        self._times[1] = now = monotonic()
        return now
