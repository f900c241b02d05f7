"""Deadlines inside the event loop that accuse nobody of what the agent itself was late for.

An agent that was stopped, or a machine that was suspended, finds the end of the time and what has
arrived meanwhile at once. `asyncio.timeout` then says that the time is up, whichever came first.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MOMENT = 0.02
"""Seconds in which what has arrived when a deadline is over is taken off its socket."""


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Cancel what is inside at a deadline of this many seconds, and raise TimeoutError.

    What had arrived when the time was up counts: it gets a moment to be read.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        # Only then does the moment begin: both ends of it may else be over in one turn of the loop.
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + MOMENT))
        try:
            yield
        finally:
            timer.cancel()


async def happens(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event; False if it is not there within so many seconds, None for no limit."""
    if seconds is None:
        return await event.wait()
    with contextlib.suppress(TimeoutError):
        async with time_limit(seconds):
            await event.wait()
    return event.is_set()
