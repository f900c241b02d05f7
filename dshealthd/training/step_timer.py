"""The timer of a step's input and forward passes, which never waits for a device."""

from __future__ import annotations

from collections import deque
from typing import Any

AVERAGED = 10
"""Steps over which times are averaged."""
SPANS = 256
"""Most pending spans kept for one step; the times of a step with more micro-steps are dropped."""
LATE = 16
"""Most steps whose times are awaited."""


class Average:
    """A moving average whose first values weigh equally, so that a long first one soon fades."""

    def __init__(self) -> None:
        """Start without a value."""
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        """Add a value to the average."""
        self._count += 1
        before = value if self.value is None else self.value
        self.value = before + (value - before) / min(self._count, AVERAGED)


class Lap:
    """The spans of one step, each from one mark to another."""

    def __init__(self) -> None:
        self.inputs: list[tuple[Any, Any]] | None = []
        """None if the wait for input cannot be told from a pause."""
        self.forwards: list[tuple[Any, Any]] = []


class StepTimer:
    """A timer of the input and the forward passes, averaged over the last steps.

    On the CPU a mark is the host's clock. On a CUDA device the host runs ahead and would only
    measure launching. There a mark is an event in the current stream, whose time is read at a
    later step, when the device has reached it. So the input time is the time for which the device
    had nothing to do, and the host's waits for results do not count as input. Nothing is known for
    other devices, nor while a CUDA graph is captured.
    """

    def __init__(self) -> None:
        """Start without values."""
        self.input = Average()
        self.forward = Average()
        self._lap = Lap()
        self._late: deque[Lap] = deque(maxlen=LATE)
        self._device: str | None = None
        self._cuda: Any = None
        self._ended: Any = None
        self._began: Any = None

    def on(self, device: str, cuda: Any) -> None:
        """Set the model's device type and start measuring; `cuda` is `torch.cuda`."""
        self._device, self._cuda = device, cuda

    def input_ended(self, now: float) -> None:
        """End an input span: a forward pass is about to begin."""
        if (
            self._ended is not None
            and self._lap.inputs is not None
            and len(self._lap.inputs) < SPANS
        ):
            self._lap.inputs.append((self._ended, self._mark(now)))
        self._ended = None

    def forward_began(self, now: float) -> None:
        """Begin a forward span: the model itself begins to compute."""
        self._began = self._mark(now)

    def forward_ended(self, now: float) -> None:
        """End a forward span."""
        if self._began is not None and len(self._lap.forwards) < SPANS:
            self._lap.forwards.append((self._began, self._mark(now)))
        self._began = None

    def interrupted(self) -> None:
        """Drop this step's input spans: the pause is not a wait for input."""
        self._ended, self._lap.inputs = None, None

    def micro_step_ended(self, now: float) -> None:
        """Begin an input span within the same step."""
        self._ended = self._mark(now)

    def step_ended(self, now: float) -> None:
        """End the step, and begin the input span of the next."""
        self._ended = self._mark(now)
        self._late.append(self._lap)
        self._lap = Lap()
        while self._late and self._settle(self._late[0]):
            self._late.popleft()

    def _mark(self, now: float) -> Any:
        """Return a mark of this moment; None if none can be made."""
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
        """Add a step's times to the averages; False if the device has not reached its marks yet."""
        inputs, forwards = lap.inputs or [], lap.forwards
        if not (_come(inputs) and _come(forwards)):
            return False
        for average, spans in ((self.input, inputs), (self.forward, forwards)):
            seconds = _total(spans)
            if seconds is not None:
                average.add(seconds)
        return True


def _come(spans: list[tuple[Any, Any]]) -> bool:
    """Return whether the device has reached all marks; on the CPU they are immediate."""
    return all(
        mark is None or isinstance(mark, float) or mark.query() for span in spans for mark in span
    )


def _total(spans: list[tuple[Any, Any]]) -> float | None:
    """Return the total seconds of spans; None if there are none or too many, or one is unknown."""
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
