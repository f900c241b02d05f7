"""What may block for heartbeat senders, in threads that nothing waits for: tasks, and the closing
of descriptors that they handed over.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from dshealthd.core import background
from dshealthd.core.child import StartError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

log = logging.getLogger(__name__)

THREADS = 8
"""Most tasks that run at a time."""
THREADS_PER_USER = 2
"""Most tasks for senders of one user, who may make them all hang."""
RETRY = 1.0
"""Seconds before starting a thread is retried; a pids limit does not go away at once."""


class BlockingTasks:
    """A queue of tasks that runs a bounded number at a time, in total and for each user."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare; answers are delivered in `loop`."""
        self._loop = loop
        self._waiting: deque[tuple[int, Callable[[], Any], Callable[[Any], object]]] = deque()
        self._running: Counter[int] = Counter()
        self._retry: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting) + self._running.total()

    def run(
        self, user: int, errand: Callable[[], Any], answer: Callable[[Any], object] = lambda _: None
    ) -> None:
        """Queue a blocking task for a user, and call `answer` with its result.

        The task must not raise.
        """
        self._waiting.append((user, errand, answer))
        if self._retry is None:
            self._start()

    def close(self) -> None:
        """Run the waiting tasks one after another in one thread, without answers."""
        waiting, self._waiting = self._waiting, deque()
        if self._retry is not None:
            self._retry.cancel()
        _finish(self._loop, [errand for _, errand, _ in waiting])

    def _start(self) -> None:
        self._retry = None
        for _ in range(len(self._waiting)):
            if self._running.total() >= THREADS:
                return
            waiting = self._waiting.popleft()
            # To the end of the queue: a user whose processes all hang must not block it.
            if self._running[waiting[0]] >= THREADS_PER_USER:
                self._waiting.append(waiting)
                continue
            try:
                background.start(functools.partial(self._run, *waiting), "a heartbeat sender")
            except StartError as error:
                self._waiting.appendleft(waiting)
                self._retry = self._loop.call_later(RETRY, self._start)
                log.warning("%s", error)
                return
            self._running[waiting[0]] += 1

    def _run(self, user: int, errand: Callable[[], Any], answer: Callable[[Any], object]) -> None:
        found = errand()

        # Decremented in the loop, where it was incremented, so that no lock is needed.
        def deliver() -> None:
            self._running[user] -= 1
            if not self._running[user]:
                del self._running[user]
            answer(found)
            if self._retry is None:
                self._start()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)


def _finish(loop: asyncio.AbstractEventLoop, errands: list[Callable[[], Any]]) -> None:
    """Run blocking tasks in one thread, as soon as one can be started."""
    if not errands or loop.is_closed():
        return
    try:
        background.start(lambda: [errand() for errand in errands], "heartbeat senders")
    except StartError as error:
        log.warning("%s", error)
        loop.call_later(RETRY, _finish, loop, errands)


MAX_THREADS = 64
"""Most threads at a time; each ends within milliseconds, unless its files' file system hangs."""
_FINISHING = 0.05
"""Seconds between the turns of `finish`."""
_CLONE_FILES = 0x400
_LAST = 1 << 30
"""A number beyond every descriptor; the kernel's own limit is fs.nr_open."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Batch:
    """Descriptors that one thread closes by exiting."""

    def __init__(self, files: list[int]) -> None:
        self.files = files
        self.copied = threading.Event()
        self.closed = threading.Event()
        self.ended = False

    def run(self) -> None:
        """Hold the files, and no others, until the loop has closed them; the thread's target."""
        try:
            if _libc.unshare(_CLONE_FILES):
                error = os.strerror(ctypes.get_errno())
                log.warning("heartbeats: unshare(CLONE_FILES): %s", error)
                for file in self.files:  # only this thread waits then
                    os.close(file)
                self.closed.set()
                return
            # the agent's own descriptors must close when the agent closes them, not at this exit
            before = -1
            for file in sorted(self.files):
                os.closerange(before + 1, file)
                before = file
            os.closerange(before + 1, _LAST)
            self.copied.set()
            self.closed.wait()
        finally:
            self.ended = True


class Closer:
    """A closer that works in batches; `turn` is called periodically."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        self._batches: list[_Batch] = []

    def __len__(self) -> int:
        """Return how many descriptors are still open."""
        held = sum(len(batch.files) for batch in self._batches if not batch.closed.is_set())
        return len(self._waiting) + held

    def put(self, file: int) -> None:
        """Queue a descriptor, which the closer owns from now on. Any thread may call this."""
        self._waiting.append(file)

    def finish(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close everything, scheduling its own turns; the agent's exit closes the rest."""
        self.turn()
        if len(self) and not loop.is_closed():
            loop.call_later(_FINISHING, self.finish, loop)

    def turn(self) -> None:
        """Continue closing descriptors, without blocking."""
        for batch in self._batches:
            if batch.copied.is_set() and not batch.closed.is_set():
                for file in batch.files:
                    os.close(file)
                batch.closed.set()
        self._batches = [batch for batch in self._batches if not batch.ended]
        if not self._waiting or len(self._batches) >= MAX_THREADS:
            return
        batch = _Batch([self._waiting.popleft() for _ in range(len(self._waiting))])
        try:
            background.start(batch.run, "heartbeat senders that have gone")
        except StartError as error:
            self._waiting.extendleft(batch.files)
            log.warning("%s", error)
            return
        self._batches.append(batch)
