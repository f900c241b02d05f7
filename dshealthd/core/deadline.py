"""Deadlines that do not accuse anybody of what the agent itself was late for."""

from __future__ import annotations

import asyncio


async def happens(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event; False if it has not happened after so many seconds.

    An agent that was stopped, or a machine that was suspended, finds the event and the end of the
    time at once, and `asyncio.timeout` then says that the time is up. What has happened counts.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
