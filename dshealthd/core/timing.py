"""Time in the event loop: deadlines that do not blame others for the agent's own delay,
calls at a fixed interval on a common grid, and the wait before a retry.

After an agent was stopped, or a machine suspended, the timeout and the data that has arrived in the
meantime are seen at once. `asyncio.timeout` then times out, whichever came first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

MOMENT = 0.02
"""Seconds after a deadline for reading data that has already arrived."""
POLL = 0.01
"""Seconds between two looks at what no event tells, such as a write of 20 ms."""


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Cancel the body after this many seconds, and raise TimeoutError.

    Data that arrived in time counts: there is a moment to read it.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        # The moment begins only now: else its begin and its end could pass in one turn of the loop.
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + MOMENT))
        try:
            yield
        finally:
            timer.cancel()


async def happens(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event; False if it is not set within `seconds` (None: no limit)."""
    if seconds is None:
        return await event.wait()
    with contextlib.suppress(TimeoutError):
        async with time_limit(seconds):
            await event.wait()
    return event.is_set()


async def holds(condition: Callable[[], object], seconds: float) -> bool:
    """Wait for a condition that no event tells; False if it does not hold within `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(POLL)
    return bool(condition())


def next_due(now: float, interval: float) -> float:
    """Return when something that happened `now` is due again: at a multiple of `interval`, half an
    interval to one and a half from now.

    What has the same interval, or a multiple of it, is due at the same moments, whenever it
    started: each wake-up finds cold caches, so one for all costs a fraction of one for each.
    """
    return math.ceil(now / interval + 0.5) * interval


async def sleep_until_due(interval: float) -> None:
    """Sleep until something that happened now is due again."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(next_due(loop.time(), interval) - loop.time())


@dataclass(frozen=True)
class Backoff:
    """Waits between retries in seconds, doubled up to a limit."""

    first: float = 1.0
    limit: float = 60.0

    def after(self, failures: int) -> float:
        """Return the wait in seconds before a retry after this many consecutive failures."""
        return min(self.limit, self.first * 2.0 ** min(failures - 1, 16))


class Periodic:
    """Calls `function`, which must not block, from the loop's next turn on until closed."""

    def __init__(self, function: Callable[[], object], interval: float) -> None:
        """Start in the running loop; `interval` is the time between calls in seconds."""
        self._function = function
        self.interval = interval
        self._loop = asyncio.get_running_loop()
        self.failed = False
        """Whether the last call failed by a defect; the log has the traceback."""
        self._timer: asyncio.Handle = self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Stop the periodic calls."""
        self._timer.cancel()

    def _turn(self) -> None:
        # Schedule the next call first, so that a defect, which the loop logs, costs only one call.
        self._timer = self._loop.call_at(next_due(self._loop.time(), self.interval), self._turn)
        self.failed = True
        self._function()
        self.failed = False
