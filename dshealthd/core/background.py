"""Threads for calls that may block. Every thread of the agent starts here.

A thread may fail to start at any moment, as the pids limit also counts threads: that is an ordinary
outcome, `StartError`. All threads are daemons, so that none delays the agent's end, as threads of
asyncio's own executor would.

A thread must not touch a disk that may hang, but have a child do it (`state_file`): a thread that
hangs in the kernel keeps its whole process alive, which SIGKILL then cannot end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dshealthd.core.child import StartError
from dshealthd.core.timing import happens

T = TypeVar("T")

LONGEST_PAUSE = 1800.0
"""Seconds between two calls of a name at most, while earlier ones hang: 48 threads a day."""
_hung: dict[str, _Hung] = {}
"""By name of the call."""
_turn = threading.Lock()


@dataclass
class _Hung:
    calls: int = 0
    pause: float = 0.0
    """Seconds before another is tried."""
    until: float = 0.0
    """The same as monotonic time."""

    def add(self, deadline: float) -> None:
        """Count one more call that hangs; the pause after the first is none, and then doubles."""
        if self.calls:
            self.pause = min(2 * self.pause + deadline, LONGEST_PAUSE)
        self.calls += 1
        self.until = time.monotonic() + self.pause


def start(target: Callable[[], object], name: str) -> None:
    """Run `target` in a background daemon thread. Raise StartError if it cannot be started."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:  # CPython raises it for EAGAIN, whatever was short
        short = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        raise StartError(f"the thread for {name}", short) from error


async def call(
    function: Callable[[], T], name: str, deadline: float | None, *errors: type[Exception]
) -> T:
    """Run `function` in a thread; return its result, or raise its exception if it is in `errors`.

    Raise StartError if no thread can be started, and TimeoutError after `deadline` seconds, if set;
    the thread then keeps running. Calls that are repeated on a hung disk do not pile up threads:
    after the second, a call of the same name raises TimeoutError at once for a time that doubles
    with each one that hangs, up to LONGEST_PAUSE. They never stop altogether, as a disk that was
    replaced answers new calls, but not the old ones.

    Raise RuntimeError if the function raises anything else; `threading.excepthook` prints its
    traceback.
    """
    hung = _hung.get(name)
    if hung is not None and time.monotonic() < hung.until:
        raise TimeoutError
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    results: list[T] = []
    failures: list[Exception] = []
    ended = overdue = False

    def run() -> None:
        nonlocal ended
        try:
            results.append(function())
        except errors as error:
            failures.append(error)
        finally:
            with _turn:
                if overdue:
                    _hung[name].calls -= 1
                    if not _hung[name].calls:
                        del _hung[name]
                ended = True
            with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
                loop.call_soon_threadsafe(done.set)

    start(run, name)
    if not await happens(done, deadline):
        with _turn:
            if deadline is not None and not ended:
                overdue = True
                _hung.setdefault(name, _Hung()).add(deadline)
        raise TimeoutError
    if failures:
        raise failures[0]
    if not results:
        raise RuntimeError(f"{name}: the thread ended with an unexpected exception")
    return results[0]
