"""Readback of scalars that a job computes, without waiting for a device."""

from __future__ import annotations

import sys
from typing import Any

INTERVAL = 0.1
"""Least seconds between two copies from a device: launching one costs some microseconds."""


class Readback:
    """The last value of a scalar that a job computes.

    A number, or a tensor on the CPU, is read at once. A tensor on a CUDA device does not hold its
    value yet, and reading it would wait for all work launched before. It is copied to pinned memory
    behind that work instead, and read at a later step, when an event says that the copy is done. So
    the value is late by a step or more, and by up to `INTERVAL` if steps are shorter. Tensors on
    other devices are not read, nor those of a subclass: a DTensor asks other ranks for its value.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.step = 0
        """The step at which the value was offered."""
        self.fresh = False
        """Whether a value has arrived since the last `take`."""
        self._host: Any = None
        self._event: Any = None
        self._pending = False
        self._copied_at = 0
        self._due = 0.0

    def offer(self, scalar: Any, now: float, step: int = 0) -> None:
        """Begin to read back a number or one-element tensor, without waiting for its device.

        `now` is monotonic time in seconds, `step` the job's step.
        """
        if isinstance(scalar, (int, float)):
            self.value, self.step, self.fresh = float(scalar), step, True
            return
        torch = sys.modules.get("torch")
        if torch is None or type(scalar) is not torch.Tensor or scalar.numel() != 1:
            return
        if scalar.device.type == "cpu":
            self.value, self.step, self.fresh = float(scalar.detach()), step, True
        elif scalar.device.type == "cuda" and now >= self._due and not self._pending:
            self._copy(scalar, now, step)

    def poll(self) -> float | None:
        """Return a value that was read back since the last call; None if none has arrived."""
        if self._pending and self._event.query():
            self._pending = False
            self.value, self.step, self.fresh = float(self._host[0]), self._copied_at, True
        if not self.fresh:
            return None
        self.fresh = False
        return self.value

    def _copy(self, scalar: Any, now: float, step: int) -> None:
        torch = sys.modules["torch"]
        if self._host is None:
            self._host = torch.empty(1, dtype=torch.float32, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()
        # Converted on the device: a copy that converts goes through pageable memory.
        self._host.copy_(scalar.detach().reshape(1).to(torch.float32), non_blocking=True)
        self._event.record(torch.cuda.current_stream(scalar.device))
        self._pending, self._copied_at, self._due = True, step, now + INTERVAL
