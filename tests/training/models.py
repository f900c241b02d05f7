"""Models of the tests that train in their own process."""

from __future__ import annotations

import time
from typing import Any

import torch

from dshealthd.training.message import StepStage
from tests.training.agents_end import AgentsEnd


class Slow(torch.nn.Module):
    """A model whose forward pass takes a while, and looks at what is told meanwhile."""

    def __init__(self, agents_end: AgentsEnd, seconds: float = 0.0) -> None:
        super().__init__()
        self.agents_end = agents_end
        self.layer = torch.nn.Linear(8, 1)
        self.seconds = seconds
        self.stages: list[int] = []
        self.took: list[float] = []
        """Seconds of each forward pass, which a busy machine makes longer."""

    def forward(self, batch: Any) -> Any:
        """Take the time."""
        started = time.perf_counter()
        self.stages.append(stage(self.agents_end))
        time.sleep(self.seconds)
        result = self.layer(batch)
        self.took.append(time.perf_counter() - started)
        return result


class Compiled(torch.nn.Module):
    """A model of which nothing keeps the compiler from a single graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def forward(self, batch: Any) -> Any:
        """Return what is learnt."""
        return self.layers(batch)


def stage(agents_end: AgentsEnd) -> int:
    """Return the stage that is told."""
    messages = agents_end.messages()
    return messages[-1].stage if messages else StepStage.UNKNOWN
