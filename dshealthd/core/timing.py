"""Deadlines in the event loop that do not blame others for the agent's own delay.

After an agent was stopped, or a machine suspended, the timeout and the data that has arrived in the
meantime are seen at once. `asyncio.timeout` then times out, whichever came first.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MOMENT = 0.02
"""Seconds after a deadline for reading data that has already arrived."""


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
