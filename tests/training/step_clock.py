"""What a training's own clock says of its steps, as bounds of what its heartbeat measures."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from dshealthd.training.step_timer import AVERAGED


def average(seconds: Sequence[float]) -> float:
    """Return the average of steps that a heartbeat tells, in which the last ones count most."""
    value = 0.0
    for count, each in enumerate(seconds, start=1):
        value += (each - value) / min(count, AVERAGED)
    return value


class StepClock:
    """Reads the clock just before and just after the heartbeat does.

    A process may lose its CPU between two lines for longer than a step takes. What the heartbeat
    measures lies between the bounds all the same, and the bounds are close together where the
    machine has nothing else to do.
    """

    def __init__(self) -> None:
        """No step has ended yet."""
        self._after = self._before = self._ended = time.perf_counter()
        self._paused = 0.0
        self._idle_since: float | None = None
        self._input: float | None = 0.0

    def step_ends(self) -> None:
        """Note the end of a step or micro-step, to be called before the heartbeat notes it."""
        self._ended = self._idle_since = time.perf_counter()

    def input_ends(self) -> None:
        """Note the begin of a forward pass, to be called after the heartbeat noted it."""
        if self._idle_since is not None and self._input is not None:
            self._input += time.perf_counter() - self._idle_since

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is called in a phase other than training, with its time noted."""

        @functools.wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self._idle_since = self._input = None
            try:
                return function(*arguments, **named)
            finally:
                self._paused += time.perf_counter() - began

        return called

    def resumed(self) -> None:
        """Note that training goes on after a pause, to be called after the heartbeat noted it."""
        self._after = time.perf_counter()

    def line(self) -> str:
        """Return the last step's bounds for the log; to be called after the heartbeat's `step`.

        The input of a step with a pause is not measured.
        """
        now = time.perf_counter()
        least, most = self._ended - self._after, now - self._before - self._paused
        waited = "unknown" if not self._input else f"{self._input:.6f}"
        self._before, self._after, self._paused, self._input = self._ended, now, 0.0, 0.0
        return f"seconds {least:.6f} to {most:.6f} input {waited}"
