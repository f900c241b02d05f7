"""A clock that a training keeps of its own time, without anything of the heartbeat's."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

WAITS = "wait"
"""The part in which the rank waits for others, but for the time that it computes meanwhile."""
PAUSES = {"evaluation", "checkpoint"}
"""Parts whose inner parts are theirs."""


def ran() -> float:
    """Return the seconds that this thread has computed, or waited for a CPU to do so."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as file:
        return sum(map(int, file.read().split()[:2])) / 1e9


class OwnClock:
    """The seconds of each part of a rank's time. Parts nest: a second is in the innermost."""

    def __init__(self) -> None:
        """Nothing is spent yet."""
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._parts = ["work"]
        self._since = time.monotonic(), ran()

    def _turn(self) -> None:
        """Add the time since the last turn to the present part."""
        (began, before), self._since = self._since, (time.monotonic(), ran())
        seconds, part = self._since[0] - began, self._parts[-1]
        if part == WAITS:
            computed = min(self._since[1] - before, seconds)
            self.spent["work"] += computed
            seconds -= computed
        self.spent[part] += seconds

    @contextlib.contextmanager
    def __call__(self, part: str, seconds: float = 0.0) -> Iterator[None]:
        """Count what is done within as this part of the time; sleep first."""
        self._turn()
        self._parts.append(self._parts[-1] if self._parts[-1] in PAUSES else part)
        try:
            time.sleep(seconds)
            yield
        finally:
            self._turn()
            self._parts.pop()

    def sleep(self, part: str, seconds: float) -> None:
        """Spend so much time on a part."""
        with self(part, seconds):
            pass

    def restart(self) -> None:
        """Forget what was spent until now, as the first step has ended."""
        self._turn()
        self.spent.clear()

    def line(self) -> str:
        """Return what was spent, for the log."""
        self._turn()
        return json.dumps(self.spent)


class Takes(torch.autograd.Function):
    """An operation whose forward and backward passes take a while."""

    @staticmethod
    def forward(context: Any, batch: torch.Tensor, clock: OwnClock, seconds: float) -> torch.Tensor:
        """Work for that long."""
        context.clock, context.seconds = clock, seconds
        clock.sleep("work", seconds)
        return batch.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Work for as long."""
        context.clock.sleep("work", context.seconds)
        return gradients[0].clone(), None, None


class SlowLinear(torch.nn.Linear):
    """A layer that takes a while in both passes."""

    def __init__(self, inputs: int, outputs: int, clock: OwnClock, seconds: float) -> None:
        """It spends `seconds` in each pass on the clock."""
        super().__init__(inputs, outputs)
        self._clock, self._seconds = clock, seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the outputs, some time later."""
        outputs = super().forward(batch)
        # As torch has it.
        later: torch.Tensor = Takes.apply(outputs, self._clock, self._seconds)  # type: ignore[no-untyped-call]
        return later
