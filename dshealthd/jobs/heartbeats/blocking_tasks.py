"""What may block for heartbeat senders, in threads that nothing waits for."""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dshealthd.core import background
from dshealthd.core.child import StartError

if TYPE_CHECKING:
    import asyncio

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

    def run(self, user: int, errand: Callable[[], Any], answer: Callable[[Any], object]) -> None:
        """Queue a blocking task for a user, and call `answer` with its result.

        The task must not raise.
        """
        self._waiting.append((user, errand, answer))
        if self._retry is None:
            self._start()

    def close(self) -> None:
        """Drop the tasks that have not begun."""
        self._waiting.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

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
