"""What the trainings of the lab have in common: a small model, and what it learns from."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from tests.lab.mishaps import Mishaps


class Network(torch.nn.Module):
    """A small network, and as long a wait as an accelerator would take for a large one."""

    def __init__(self, mishaps: Mishaps) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )
        self.mishaps = mishaps

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.mishaps.compute(0.03)
        prediction: torch.Tensor = self.layers(batch)
        return prediction


def batches(mishaps: Mishaps) -> Iterator[torch.Tensor]:
    """Read what there is to learn from."""
    while True:
        time.sleep(0.01)  # reads and decodes
        yield mishaps.read(torch.randn(16, 64))
