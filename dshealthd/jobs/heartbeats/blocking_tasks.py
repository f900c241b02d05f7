"""Blocking tasks on behalf of senders of heartbeats: done in threads that nothing waits for."""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from dshealthd.core import background
from dshealthd.core.child import StartError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

log = logging.getLogger(__name__)

THREADS = 8
"""Errands that run at a time."""
THREADS_PER_USER = 2
"""The same for senders of one user, who may have them all hang."""
RETRY = 1.0
"""Seconds until a thread that could not be started is tried again; a pids limit lasts."""


class BlockingTasks:
    """A bounded number at a time, of all users and of each; the rest wait for their turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answers are given in `loop`."""
        self._loop = loop
        self._waiting: deque[tuple[int, Callable[[], Any], Callable[[Any], object]]] = deque()
        self._running: Counter[int] = Counter()
        self._retry: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many are run or wait."""
        return len(self._waiting) + self._running.total()

    def run(
        self, user: int, errand: Callable[[], Any], answer: Callable[[Any], object] = lambda _: None
    ) -> None:
        """Run a blocking task some time for a user, and call `answer` with what it returned.

        It must not raise.
        """
        self._waiting.append((user, errand, answer))
        if self._retry is None:
            self._start()

    def close(self) -> None:
        """Have the blocking tasks that wait run one after the other, without an answer."""
        waiting, self._waiting = self._waiting, deque()
        if self._retry is not None:
            self._retry.cancel()
        _finish(self._loop, [errand for _, errand, _ in waiting])

    def _start(self) -> None:
        """Start the blocking tasks that may be: not of a user who has too many already."""
        self._retry = None
        for _ in range(len(self._waiting)):
            if self._running.total() >= THREADS:
                return
            waiting = self._waiting.popleft()
            # Behind the others: a user whose processes all hang must not stop the queue.
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

        # Counted down in the loop, where it was counted up, so that no lock is needed.
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
