"""Calls that can block, such as those that touch files on another machine: in a thread that nobody waits for longer than he wants to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def call(function: Callable[[], T], deadline: float | None, *errors: type[Exception]) -> T:
    """Return what `function` returns, or raise what it raises of `errors`.

    TimeoutError after `deadline` seconds, if there is one; the thread is left alone. It is a daemon thread: one that hangs does not keep
    the process from ending, as one of asyncio's own executor would.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except errors as error:
            failures.append(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="probe files", daemon=True).start()
    async with asyncio.timeout(deadline):
        await done.wait()
    if failures:
        raise failures[0]
    return results[0]
