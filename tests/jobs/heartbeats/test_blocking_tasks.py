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
    """Hangs until it is told not to."""

    def __init__(self, hanging: frozenset[int]) -> None:
        self.hanging = hanging
        self.release = threading.Event()
        self.most: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self._lock = threading.Lock()

    def look(self, user: int) -> int:
        """Hang for some users, and note how many look at a time."""
        with self._lock:
            self._running[user] = self._running.get(user, 0) + 1
            self.most[user] = max(self.most.get(user, 0), self._running[user])
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
        for sender in range(20):
            blocking_tasks.run(
                (user, sender),
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


async def test_errands_of_many_users() -> None:
    """However many users there are, so many threads hang."""
    kernel, answers = Kernel(frozenset(range(10))), list[int]()
    blocking_tasks = BlockingTasks(asyncio.get_running_loop())
    for user in range(10):
        blocking_tasks.run(user, user, functools.partial(kernel.look, user), answers.append)
    assert blocking_tasks._running.total() == THREADS
    kernel.release.set()
    while len(answers) < 10:
        await asyncio.sleep(0.01)
