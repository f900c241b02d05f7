"""What has happened when the time is up counts: the agent itself may have been stopped meanwhile."""

from __future__ import annotations

import asyncio
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import pytest

from dshealthd.collection import worker_process
from dshealthd.collection.worker_process import WorkerProcess
from dshealthd.core import background, child, wire
from dshealthd.core.timing import happens, time_limit

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


async def test_an_event_that_came_with_the_end_of_its_time_has_happened() -> None:
    """The loop finds both at once."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        loop.call_soon(event.set)
        time.sleep(2 * SECONDS)

    loop.call_soon(stop)
    assert await happens(event, SECONDS)
    assert not await happens(asyncio.Event(), SECONDS)


async def test_a_child_that_ended_while_the_agent_was_stopped_can_be_killed() -> None:
    """It is not taken for one that hangs in the kernel, which nothing would ever take back."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    started = child.spawn("a sleeper", command)
    ended = threading.Event()
    threading.Thread(target=_set_when_ended, args=(started.pid, ended)).start()
    assert await stopped_during(started.killed(SECONDS), ended)
    assert started.code is not None


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


async def test_a_call_that_returned_while_the_agent_was_stopped_has_returned() -> None:
    """A disk that answered is not said to hang; one that does not answer is."""
    returned, never = threading.Event(), threading.Event()

    def look() -> int:
        returned.set()
        return 7

    call = background.call(look, "a disk", SECONDS)
    assert await stopped_during(call, returned) == 7
    with pytest.raises(TimeoutError):
        await background.call(lambda: never.wait(60.0), "a disk", SECONDS)
    never.set()


async def stopped_until_readable(waiting: Coroutine[None, None, T], descriptor: int) -> T:
    """Return what a coroutine does while whose deadline the loop stops, and an answer arrives."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)  # it waits now
    assert select.select([descriptor], [], [], 60.0)[0]
    time.sleep(2 * SECONDS)
    return await task


async def test_what_had_arrived_is_read_after_the_deadline() -> None:
    """Two reads are needed, of what came while the loop was stopped; what never comes is cut off."""
    with child.channel("a test") as (ours, theirs):
        reader, writer = await child.streams(ours)

        async def read() -> bytes:
            async with time_limit(SECONDS):
                return await reader.readexactly(2) + await reader.readexactly(3)

        theirs.sendall(b"hello")
        assert await stopped_until_readable(read(), ours.fileno()) == b"hello"
        with pytest.raises(TimeoutError):
            await read()
        writer.close()


def test_a_worker_that_was_ready_while_the_agent_was_stopped_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not ended as one that does not start; one that says nothing is."""
    monkeypatch.setattr(worker_process, "START_DEADLINE", SECONDS)
    frame = wire.pack({"ready": True})
    told = (
        "import os, select, signal, sys; channel = int(sys.argv[2]); "
        "select.select([channel], [], []); "  # the agent's greeting
        f"os.write(channel, {frame!r}); signal.pause()"
    )

    async def greeted(code: str, *, answers: bool) -> None:
        started = await worker_process.start("test", (sys.executable, "-S", "-c", code))
        worker = WorkerProcess("test", started, {}, {}, time.monotonic)
        channel = started[1]._transport.get_extra_info("socket").fileno()
        try:
            if answers:
                await stopped_until_readable(worker.greet({}), channel)
            else:
                await worker.greet({})
        finally:
            assert await started[0].killed(60.0)
            worker.let_go()

    asyncio.run(greeted(told, answers=True))
    with pytest.raises(worker_process.Broken, match="was not ready within"):
        asyncio.run(greeted("import signal; signal.pause()", answers=False))
