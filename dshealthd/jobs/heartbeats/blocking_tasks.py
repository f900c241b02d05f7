"""What may block for heartbeat senders, in threads that nothing waits for."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable
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
        self._waiting: dict[Hashable, tuple[int, Callable[[], Any], Callable[[Any], object]]] = {}
        self._running: Counter[int] = Counter()
        self._retry: asyncio.TimerHandle | None = None

    def run(
        self,
        sender: Hashable,
        user: int,
        errand: Callable[[], Any],
        answer: Callable[[Any], object],
    ) -> None:
        """Queue a blocking task for a user's sender, and call `answer` with its result.

        The task must not raise.
        """
        self._waiting[sender] = user, errand, answer
        if self._retry is None:
            self._start()

    def drop(self, sender: Hashable) -> None:
        """Drop the task of a sender, if it has not begun."""
        self._waiting.pop(sender, None)

    def close(self) -> None:
        """Drop the tasks that have not begun."""
        self._waiting.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _start(self) -> None:
        self._retry = None
        for sender, waiting in list(self._waiting.items()):
            if self._running.total() >= THREADS:
                return
            # The next one: a user whose processes all hang must not block the queue.
            if self._running[waiting[0]] >= THREADS_PER_USER:
                continue
            try:
                background.start(functools.partial(self._run, *waiting), "a heartbeat sender")
            except StartError as error:
                self._retry = self._loop.call_later(RETRY, self._start)
                log.warning("%s", error)
                return
            del self._waiting[sender]
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
