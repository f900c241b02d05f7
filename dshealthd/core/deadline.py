"""Deadlines that do not accuse anybody of what the agent itself was late for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

T = TypeVar("T")
MOMENT = 0.02
"""Seconds in which what has arrived when a deadline is over is taken off its socket."""


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


async def in_time(awaitable: Awaitable[T], seconds: float) -> T:
    """Return what an awaitable gives; TimeoutError, with it cancelled, after so many seconds.

    What had arrived when the time was up counts here too: it gets a moment to be read.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            await asyncio.wait({task}, timeout=MOMENT)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Cancel what is inside after so many seconds, and raise TimeoutError; as `in_time`, but for
    what must stay in its caller's task.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        # Not before what had arrived by then has been read: both may come up in one turn.
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + MOMENT))
        try:
            yield
        finally:
            timer.cancel()
