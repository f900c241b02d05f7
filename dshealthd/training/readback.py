"""Readback of a training's scalars, without making it wait for a device."""

from __future__ import annotations

import sys
from typing import Any

INTERVAL = 0.1
"""Seconds from one copy off a device to the next: a copy costs some microseconds of launching."""


class Readback:
    """The last value of a scalar that training computes.

    A number, or a tensor on the CPU, is read at once. A tensor on a CUDA device does not hold its
    value yet, and asking for it would wait until the device has done all that was launched before:
    it is copied to pinned memory behind that work, and read at a later step, when an event says
    that the copy is done. So the value is late by a step or more, and by up to `INTERVAL` where
    steps are shorter. Tensors of other devices, and while a CUDA graph is captured, are left
    unread.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.value: float | None = None
        self.fresh = False
        """Whether a value came since `take`."""
        self._host: Any = None
        self._event: Any = None
        self._pending = False
        self._due = 0.0

    def offer(self, scalar: Any, now: float) -> None:
        """Read back a number or a tensor with one element, now or later.

        `now` is monotonic time in seconds.
        """
        if isinstance(scalar, (int, float)):
            self.value, self.fresh = float(scalar), True
            return
        device = getattr(scalar, "device", None)
        if device is None or scalar.numel() != 1:
            return
        if device.type == "cpu":
            self.value, self.fresh = float(scalar.detach()), True
        elif device.type == "cuda" and now >= self._due:
            self._copy(scalar, now)

    def take(self) -> float | None:
        """Return a value that was read back since the last call; None if none was."""
        if self._pending and self._event.query():
            self._pending = False
            self.value, self.fresh = float(self._host[0]), True
        if not self.fresh:
            return None
        self.fresh = False
        return self.value

    def _copy(self, scalar: Any, now: float) -> None:
        torch = sys.modules["torch"]
        if self._pending or torch.cuda.is_current_stream_capturing():
            return
        if self._host is None:
            self._host = torch.empty(1, dtype=torch.float32, pin_memory=True)
            self._event = torch.cuda.Event()
        # Converted on the device: a copy that converts goes through pageable memory.
        self._host.copy_(scalar.detach().reshape(1).to(torch.float32), non_blocking=True)
        self._event.record(torch.cuda.current_stream(scalar.device))
        self._pending, self._due = True, now + INTERVAL
