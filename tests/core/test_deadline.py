"""What has happened when the time is up counts: the agent itself may have been stopped meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import pytest

from dshealthd.core import background, child
from dshealthd.core.deadline import happens

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
SECONDS = 0.05
"""The deadline; the loop is stopped for longer."""


async def stopped_during(waiting: Coroutine[None, None, T], happening: threading.Event) -> T:
    """Return what a coroutine does while whose deadline the loop stops, and something happens."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)  # it waits now
    assert happening.wait(60.0)
    time.sleep(2 * SECONDS)  # as SIGSTOP, or a machine that is suspended, would
    return await task


def test_an_event_that_came_with_the_end_of_its_time_has_happened() -> None:
    """The loop finds both at once."""

    async def scene() -> None:
        event, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon(event.set)
            time.sleep(2 * SECONDS)

        loop.call_soon(stop)
        assert await happens(event, SECONDS)
        assert not await happens(asyncio.Event(), SECONDS)

    asyncio.run(scene())


def test_a_child_that_ended_while_the_agent_was_stopped_can_be_killed() -> None:
    """It is not taken for one that hangs in the kernel, which nothing would ever take back."""

    async def scene() -> None:
        started = child.spawn("a sleeper", [sys.executable, "-S", "-c", "input()"])
        ended = threading.Event()
        threading.Thread(target=_set_when_ended, args=(started.pid, ended)).start()
        assert await stopped_during(started.killed(SECONDS), ended)
        assert started.code is not None

    asyncio.run(scene())


def _set_when_ended(pid: int, ended: threading.Event) -> None:
    """Set `ended` when a process has ended, and nobody has reaped it."""
    while not ended.wait(0.01):
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                ended.set()


def test_a_call_that_returned_while_the_agent_was_stopped_has_returned() -> None:
    """A disk that answered is not said to hang; one that does not answer is."""

    async def scene() -> None:
        returned, never = threading.Event(), threading.Event()

        def look() -> int:
            returned.set()
            return 7

        call = background.call(look, "a disk", SECONDS)
        assert await stopped_during(call, returned) == 7
        with pytest.raises(TimeoutError):
            await background.call(lambda: never.wait(60.0), "a disk", SECONDS)
        never.set()

    asyncio.run(scene())
