"""Calls a function of the event loop at a fixed interval."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Periodic:
    """Calls `function`, which must not block, from the loop's next turn on until it is closed."""

    def __init__(self, function: Callable[[], object], interval: float) -> None:
        """Begin, in the running loop; `interval` is in seconds from one call to the next."""
        self._function = function
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self.failed = False
        """Whether the last call ended by a defect; the log has the traceback."""
        self._timer: asyncio.Handle = self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Call the periodic function no longer."""
        self._timer.cancel()

    def _turn(self) -> None:
        # The next call is planned first, so that a defect, which the loop logs, costs one turn.
        self._timer = self._loop.call_later(self._interval, self._turn)
        self.failed = True
        self._function()
        self.failed = False
