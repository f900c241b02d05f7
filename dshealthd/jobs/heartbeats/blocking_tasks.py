"""What may block on behalf of a sender, done in threads that nobody waits for and that do not delay the agent's end."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

THREADS = 8
"""Errands that are run at a time."""
THREADS_PER_USER = 2
"""The same for senders of one user, who may have them all hang."""


class Errands:
    """A bounded number at a time, of all users and of each; the rest wait for their turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answers are given in `loop`."""
        self._loop = loop
        self._waiting: deque[tuple[int, Callable[[], Any], Callable[[Any], object]]] = deque()
        self._running: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return how many are run or wait."""
        return len(self._waiting) + self._running.total()

    def run(self, user: int, errand: Callable[[], Any], answer: Callable[[Any], object] = lambda _: None) -> None:
        """Have an errand be run some time on behalf of a user, and `answer` be called with what it returned. It must not raise."""
        self._waiting.append((user, errand, answer))
        self._start()

    def close(self) -> None:
        """Have those that wait be run one after the other, without an answer to anybody."""
        waiting, self._waiting = self._waiting, deque()
        threading.Thread(target=lambda: [errand() for _, errand, _ in waiting], name="heartbeat senders", daemon=True).start()

    def _start(self) -> None:
        """Start what may be started: those of a user who has too many already are passed over."""
        for _ in range(len(self._waiting)):
            if self._running.total() >= THREADS:
                return
            waiting = self._waiting.popleft()
            if self._running[waiting[0]] >= THREADS_PER_USER:
                self._waiting.append(waiting)
                continue
            self._running[waiting[0]] += 1
            threading.Thread(target=self._run, args=waiting, name="heartbeat sender", daemon=True).start()

    def _run(self, user: int, errand: Callable[[], Any], answer: Callable[[Any], object]) -> None:
        found = errand()

        def deliver() -> None:
            self._running[user] -= 1
            if not self._running[user]:
                del self._running[user]
            answer(found)
            self._start()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)
