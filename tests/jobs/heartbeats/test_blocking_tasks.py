"""What is done in threads on behalf of senders."""

from __future__ import annotations

import asyncio
import functools
import os
import threading

from dshealthd.jobs.heartbeats.blocking_tasks import BlockingTasks
from tests.stopwatch import Stopwatch

THREADS = 8
THREADS_PER_USER = 2


class Kernel:
    """ints when it is told to."""

    def __init__(self, hanging: frozenset[int]) -> None:
        self.hanging = hanging
        self.release = threading.Event()
        self.at_once = 0
        self.most: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self._lock = threading.Lock()

    def look(self, user: int) -> int:
        """Hang for some users, and note how many look at a time."""
        with self._lock:
            self._running[user] = self._running.get(user, 0) + 1
            self.most[user] = max(self.most.get(user, 0), self._running[user])
            self.at_once = max(self.at_once, sum(self._running.values()))
        if user in self.hanging:
            self.release.wait(100)
        with self._lock:
            self._running[user] -= 1
        return user


async def test_errands_that_hang() -> None:
    """What hangs on behalf of one user keeps neither the loop nor other users waiting."""
    kernel = Kernel(frozenset({1}))
    answers: list[tuple[int, float]] = []
    blocking_tasks = BlockingTasks(asyncio.get_running_loop())
    watch = Stopwatch(os.getpid())
    for user in (1, 2):
        for _ in range(20):
            blocking_tasks.run(
                user,
                functools.partial(kernel.look, user),
                lambda found: answers.append((found, watch.seconds())),
            )
    while len(answers) < 20:
        await asyncio.sleep(0.01)
    assert {user for user, _ in answers} == {2}
    assert max(seconds for _, seconds in answers) < 1.0
    kernel.release.set()
    while len(answers) < 40:
        await asyncio.sleep(0.01)
    assert kernel.most[1] == THREADS_PER_USER
    assert kernel.at_once <= THREADS
