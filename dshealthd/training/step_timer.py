"""The timer of a step's input and forward passes, which never waits for a device."""

from __future__ import annotations

from collections import deque
from typing import Any

AVERAGED = 10
"""Steps over which times are averaged."""
SPANS = 256
"""Times of one step that are kept while they are not known.

Of one with more micro-steps nothing is told.
"""
LATE = 16
"""Steps whose times are waited for."""


class Average:
    """A moving average, to which the first values count alike, so that a long first one is soon
    forgotten.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        """Take a timed value into the average."""
        self._count += 1
        before = value if self.value is None else self.value
        self.value = before + (value - before) / min(self._count, AVERAGED)


class Lap:
    """The times of one step, each from one mark to another."""

    def __init__(self) -> None:
        self.inputs: list[tuple[Any, Any]] | None = []
        """None where it cannot be known what was waiting for input."""
        self.forwards: list[tuple[Any, Any]] = []


class StepTimer:
    """Averages over the last steps.

    On the CPU a mark is the host's clock. On a CUDA device the host is ahead, and would measure how
    long launching takes: there a mark is an event in the current stream, which is asked for its
    time at a later step, when the device has come to it. So the time of the input is that for which
    the device has had nothing to do, and no wait of the host for results counts as one for input.
    Of other devices, and while a CUDA graph is captured, nothing is known.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.input = Average()
        self.forward = Average()
        self._lap = Lap()
        self._late: deque[Lap] = deque(maxlen=LATE)
        self._device: str | None = None
        self._cuda: Any = None
        self._ended: Any = None
        self._began: Any = None

    def on(self, device: str, cuda: Any) -> None:
        """Tell the timer on which type of device the model is; nothing is measured before.

        `cuda` is `torch.cuda`.
        """
        self._device, self._cuda = device, cuda

    def input_ended(self, now: float) -> None:
        """Time the input of a step: a forward pass is about to begin."""
        if (
            self._ended is not None
            and self._lap.inputs is not None
            and len(self._lap.inputs) < SPANS
        ):
            self._lap.inputs.append((self._ended, self._mark(now)))
        self._ended = None

    def forward_began(self, now: float) -> None:
        """Time a forward pass of a step: the model itself begins to compute."""
        self._began = self._mark(now)

    def forward_ended(self, now: float) -> None:
        """Time a forward pass of a step: it has ended."""
        if self._began is not None and len(self._lap.forwards) < SPANS:
            self._lap.forwards.append((self._began, self._mark(now)))
        self._began = None

    def interrupted(self) -> None:
        """Stop timing the input of a step: what goes on is no wait for it."""
        self._ended, self._lap.inputs = None, None

    def micro_step_ended(self, now: float) -> None:
        """Time the input of the next forward pass from here on, in the same step."""
        self._ended = self._mark(now)

    def step_ended(self, now: float) -> None:
        """Time the next step, which begins."""
        self._ended = self._mark(now)
        self._late.append(self._lap)
        self._lap = Lap()
        while self._late and self._settle(self._late[0]):
            self._late.popleft()

    def _mark(self, now: float) -> Any:
        """Return the timer's mark of this moment; None if there is none."""
        if self._device == "cpu":
            return now
        if self._device != "cuda":
            return None
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self, lap: Lap) -> bool:
        """Take the times of a timed step into the averages, or tell that they are not there yet."""
        inputs, forwards = lap.inputs or [], lap.forwards
        if not (_come(inputs) and _come(forwards)):
            return False
        for average, spans in ((self.input, inputs), (self.forward, forwards)):
            seconds = _total(spans)
            if seconds is not None:
                average.add(seconds)
        return True


def _come(spans: list[tuple[Any, Any]]) -> bool:
    """Tell whether the device has come to all of a timer's marks; there is no wait on the CPU."""
    return all(
        mark is None or isinstance(mark, float) or mark.query() for span in spans for mark in span
    )


def _total(spans: list[tuple[Any, Any]]) -> float | None:
    """Return the seconds of all timed spans; None if there are none, or one is not known."""
    if not 0 < len(spans) < SPANS:
        return None
    total = 0.0
    for begin, end in spans:
        if begin is None or end is None:
            return None
        if isinstance(end, float):
            total += max(end - begin, 0.0)
            continue
        try:
            total += max(float(begin.elapsed_time(end)), 0.0) / 1000.0
        except (RuntimeError, ValueError):  # events of two devices
            return None
    return total
