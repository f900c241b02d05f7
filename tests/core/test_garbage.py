"""Memory that is not needed is freed, and returned to the kernel."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dshealthd.agent.agent import _keep_freeing
from dshealthd.collection.worker_process import Channel
from dshealthd.core import garbage
from dshealthd.core.garbage import Cycles
from tests.jobs.machines import Clock
from tests.waiting import eventually

EVERY = 60.0

MIB = 1 << 20


class Linked:
    """An object that can be part of a cycle."""

    def __init__(self) -> None:
        self.other: Linked | None = None


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """Leave the collector of this process as it was."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def resident() -> int:
    """Return this process's resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cycle() -> weakref.ref[Linked]:
    """Make two objects that only hold each other, and return a weak reference to one."""
    one, two = Linked(), Linked()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_cycles_are_freed_once_a_minute() -> None:
    """A cycle is not searched for before a minute has passed, and is gone after it."""
    clock = Clock()
    cycles = Cycles(clock)
    left = cycle()
    clock.now += EVERY - 0.75
    cycles.free()
    assert left() is not None
    clock.now += 0.25  # the last half a second may be missing
    cycles.free()
    assert left() is None
    left = cycle()
    cycles.free()
    assert left() is not None


def test_cycles_are_searched_for_after_ten_thousand_new_objects() -> None:
    """As many of a sweep's samples are not checked each time; a burst of cycles is bounded."""
    Cycles(Clock())
    left = cycle()
    new = [[number] for number in range(9_000)]
    assert left() is not None
    new += [[number] for number in range(2_000)]
    assert left() is None


async def freed(left: weakref.ref[Any]) -> None:
    """Wait until what was left over is freed."""
    await eventually(lambda: left() is None)


async def test_agent_frees_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's own task does so, time and again."""
    monkeypatch.setattr(garbage, "EVERY", 0.01)
    task = asyncio.create_task(_keep_freeing(Cycles(time.monotonic)))
    for _ in range(2):
        await freed(cycle())
    task.cancel()


def test_cycles_of_the_start_are_freed_at_once() -> None:
    """What was left over before is freed, not kept for good with the objects that are in use."""
    left = cycle()
    Cycles(Clock())
    assert left() is None


@pytest.mark.parametrize("how", ["close", "abort"])
def test_transport_is_freed_as_it_closes(how: str) -> None:
    """A closed connection to a worker does not wait for the search for cycles."""

    async def closed() -> weakref.ref[asyncio.BaseTransport]:
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(Channel, sock=ours)
            getattr(transport, how)()
            return weakref.ref(transport)

    async def scene() -> None:
        await freed(await closed())

    gc.collect()
    gc.disable()
    try:
        asyncio.run(scene())
    finally:
        gc.enable()


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="not glibc")
def test_freed_memory_below_a_block_in_use_is_returned() -> None:
    """A burst of texts does not leave the process larger, although the last block is still in use.
    Without the trim, the heap keeps all of it: only its top is returned.
    """
    clock = Clock()
    cycles = Cycles(clock)
    before = resident()
    # Smaller than the blocks that glibc maps on their own.
    texts = [b"x" * (60_000 + number) for number in range(1000)]
    last = b"x" * 60_000
    assert resident() - before > 50 * MIB
    del texts
    clock.now += EVERY
    cycles.free()
    assert resident() - before < 10 * MIB
    assert last
