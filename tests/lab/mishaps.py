"""What goes wrong within a training script of the lab on request.

A mishap lasts while a file of its name and rank is there.
"""

from __future__ import annotations

import os
import resource
import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:  # the demonstration runs without torch
    from torch import Tensor

DIRECTORY = "MISHAPS"
"""The variable that names the directory of these files."""
PAUSE = 0.05
SLOWER = 0.5
"""Share by which a rank is slower: more than what docs/jobs.md promises to name among even ranks,
0.3, as two dozen processes on two cores are not even.
"""
MESSAGE = 1.0
"""Seconds that a step must take for it to have a message of its own, as those of large models do:
`dshealthd.training.heartbeat.SLOW_INTERVAL`. Among shorter ones the first NaN may fall between two.
"""
LONG_STEPS = 4
"""How many are made so long: a message has the loss of a step or more before it
(`dshealthd.training.readback`)."""
CHUNK = 16 << 20
"""Bytes that leak with each batch."""
LEFT_FREE = 0.97
"""Share of the files that a rank may have open, which it does not go beyond."""


class Mishaps:
    """Those of one rank; none where the environment names no directory."""

    def __init__(self) -> None:
        """Take rank and directory from the environment."""
        self._directory = os.environ.get(DIRECTORY, "")
        self._rank = os.environ["RANK"]
        self._files: list[IO[bytes]] = []
        self._memory: list[bytearray] = []
        self._lost = 0

    def happens(self, name: str) -> bool:
        """Tell whether it is in force for this rank."""
        return bool(self._directory) and os.path.exists(f"{self._directory}/{name}.{self._rank}")

    def read(self, batch: Tensor) -> Tensor:
        """Return what the rank reads as its next batch: late, or with a NaN in it.

        And let it use up memory or files meanwhile.
        """
        while self.happens("input-stalls"):
            time.sleep(PAUSE)
        if not self.happens("files-leak"):
            self._files.clear()
        most = LEFT_FREE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        while self.happens("files-leak") and len(os.listdir("/proc/self/fd")) < most:
            self._files.append(open("/dev/null", "rb"))  # noqa: SIM115 - it leaks
        if self.happens("memory-leaks"):
            self._memory.append(bytearray(b"\1") * CHUNK)
        if self.happens("not-a-number"):
            self._lost += 1
            time.sleep(MESSAGE if self._lost <= LONG_STEPS else 0.0)
            batch = batch.clone()
            batch[0, 0] = float("nan")
        return batch

    def compute(self, seconds: float) -> None:
        """Wait as long as an accelerator takes to compute, which may be slower than others."""
        time.sleep(seconds * (1 + SLOWER * self.happens("slow")))
