"""Threads for what may block. Every thread of the agent starts here.

A thread may fail to start at any moment, as the pids limit counts threads too: that is an ordinary
outcome, `StartError`. All are daemons, so that none delays the agent's end, as those of asyncio's
own executor would.

A thread must not touch a disk that may hang, but have a child do it (`state_file`): a thread that
hangs in the kernel keeps its whole process, which SIGKILL then cannot end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, TypeVar

from dshealthd.core.child import StartError
from dshealthd.core.deadline import happens

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def start(target: Callable[[], object], name: str) -> None:
    """Run `target` in a daemon thread of the background; StartError if none can be started."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:  # so says CPython for EAGAIN, whatever was short
        short = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        what = f"the thread for {name}"
        raise StartError(what, short) from error


async def call(
    function: Callable[[], T], name: str, deadline: float | None, *errors: type[Exception]
) -> T:
    """Return what `function` returns in a thread, or raise what it raises of `errors`.

    StartError if no thread can be started. TimeoutError after `deadline` seconds, if there is one;
    the thread is then left alone. RuntimeError if the function raises anything else, whose
    traceback `threading.excepthook` prints.
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
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set)

    start(run, name)
    if not await happens(done, deadline):
        raise TimeoutError
    if failures:
        raise failures[0]
    if not results:
        message = f"{name}: the thread ended by an exception that is not expected"
        raise RuntimeError(message)
    return results[0]
