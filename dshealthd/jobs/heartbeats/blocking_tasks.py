"""What may block for heartbeat senders, in threads that nothing waits for."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from dshealthd.core import background
from dshealthd.core.child import StartError

T = TypeVar("T")

log = logging.getLogger(__name__)

THREADS = 8
"""Most tasks that run at a time."""
THREADS_PER_USER = 2
"""Most tasks for senders of one user, who may make them all hang."""
RETRY = 1.0
"""Seconds before starting a thread is retried; a pids limit does not go away at once."""


class BlockingTasks:
    """Runs a bounded number of tasks at a time, in total and for each user."""

    def __init__(self) -> None:
        """Begin without tasks."""
        self._places = asyncio.Semaphore(THREADS)
        self._of_user: defaultdict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(THREADS_PER_USER)
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def run(self, user: int, errand: Callable[[], T], answer: Callable[[T], object]) -> None:
        """Queue a blocking task for a user, and call `answer` with its result in the running loop.

        The task must not raise.
        """
        task = asyncio.get_running_loop().create_task(self._run(user, errand, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Drop the tasks that have not begun."""
        self._closed = True

    async def _run(self, user: int, errand: Callable[[], T], answer: Callable[[T], object]) -> None:
        # The user's first: whose processes all hang must not take the places of others.
        async with self._of_user[user], self._places:
            while not self._closed:
                try:
                    found = await background.call(errand, "a heartbeat sender", None)
                except StartError as error:
                    log.warning("%s", error)
                    await asyncio.sleep(RETRY)
                else:
                    answer(found)
                    return
