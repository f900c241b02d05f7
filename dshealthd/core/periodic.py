"""Calls a function at a fixed interval in the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Periodic:
    """Calls `function`, which must not block, from the loop's next turn on until closed."""

    def __init__(self, function: Callable[[], object], interval: float) -> None:
        """Start in the running loop; `interval` is the time between calls in seconds."""
        self._function = function
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self.failed = False
        """Whether the last call failed by a defect; the log has the traceback."""
        self._timer: asyncio.Handle = self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Stop calling the function."""
        self._timer.cancel()

    def _turn(self) -> None:
        # Schedule the next call first, so that a defect, which the loop logs, costs only one call.
        self._timer = self._loop.call_later(self._interval, self._turn)
        self.failed = True
        self._function()
        self.failed = False
