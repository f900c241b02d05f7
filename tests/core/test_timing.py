"""What has happened when the time is up counts: the agent itself may have been stopped
meanwhile.
"""

from __future__ import annotations

import asyncio
import select
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

import pytest

from dshealthd.core import background, child
from dshealthd.core.timing import Backoff, happens, holds, next_due, time_limit
from tests.probe.peering import at_once

T = TypeVar("T")
SECONDS = 0.05
"""The deadline; the loop is stopped for longer."""


async def stopped_during(
    waiting: Coroutine[None, None, T], happening: Callable[[float], object]
) -> T:
    """Return what a coroutine does while whose deadline the loop stops, and something happens."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)  # it waits now
    assert happening(60.0)
    time.sleep(2 * SECONDS)  # as SIGSTOP, or a machine that is suspended, would
    return await task


def test_intervals_share_a_grid() -> None:
    """What is due every 5 s and what is due every 15 s is due at once; half an interval at least
    and one and a half at most lie between.
    """
    assert next_due(1000.0, 5.0) == 1005.0
    assert next_due(1000.0, 15.0) == 1020.0  # 1005 is nearer than half of it
    assert next_due(1002.5, 5.0) == 1005.0
    assert next_due(1002.6, 5.0) == 1010.0
    assert next_due(1004.999, 5.0) == next_due(1005.1, 5.0) == 1010.0


async def test_a_condition_is_waited_for() -> None:
    """Until it holds, or for some seconds."""
    happened: list[int] = []
    asyncio.get_running_loop().call_later(SECONDS, happened.append, 1)
    assert not await holds(lambda: happened, 0.0)
    assert await holds(lambda: happened, 60.0)


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 1.0), (2, 2.0), (6, 32.0), (7, 60.0), (5000, 60.0)]
)
def test_waits_between_retries(failures: int, seconds: float) -> None:
    """Doubled from a second to a minute, however often it fails."""
    assert Backoff().after(failures) == seconds
    assert Backoff(2.0, 1e9).after(failures) == 2.0 ** min(failures, 17)


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
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        started = child.spawn("a sleeper", command)
        ended = threading.Event()
        threading.Thread(target=_set_when_ended, args=(started.pid, ended)).start()
        assert await stopped_during(started.killed(SECONDS), ended.wait)
        assert started.code is not None

    asyncio.run(scene())


def _set_when_ended(pid: int, ended: threading.Event) -> None:
    """Set `ended` when a process has ended, which is reaped already where the loop was quicker."""
    while not ended.wait(0.01):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "Z"
        if state == "Z":
            ended.set()


def test_a_call_that_returned_while_the_agent_was_stopped_has_returned() -> None:
    """A disk that answered is not said to hang; one that does not answer is."""

    async def scene() -> None:
        returned, never = threading.Event(), threading.Event()

        def look() -> int:
            returned.set()
            return 7

        call = background.call(look, "a disk", SECONDS)
        assert await stopped_during(call, returned.wait) == 7
        with pytest.raises(TimeoutError):
            await background.call(lambda: never.wait(60.0), "a disk", SECONDS)
        never.set()

    asyncio.run(scene())


def test_what_arrives_a_moment_after_the_deadline_is_read() -> None:
    """Nothing is cut off before 20 ms have passed."""

    async def scene() -> None:
        with pytest.raises(TimeoutError):
            async with time_limit(1.0):
                await asyncio.sleep(60.0)

    assert at_once(scene())[1] == pytest.approx(1.02)


def test_what_had_arrived_is_read_after_the_deadline() -> None:
    """Two reads are needed, of what came while the loop was stopped; what never comes is cut
    off.
    """

    async def scene() -> None:
        with child.channel("a test") as (ours, theirs):
            reader, writer = await asyncio.open_connection(sock=ours)

            async def read() -> bytes:
                async with time_limit(SECONDS):
                    return await reader.readexactly(2) + await reader.readexactly(3)

            def arrives(seconds: float) -> object:
                return select.select([ours.fileno()], [], [], seconds)[0]

            theirs.sendall(b"hello")
            assert await stopped_during(read(), arrives) == b"hello"
            with pytest.raises(TimeoutError):
                await read()
            writer.close()

    asyncio.run(scene())
