"""Starvation: whether this node was too busy to observe others, as its loop or a child got no CPU.

A deadline that passes meanwhile says nothing of the other side: the answer may have been there, or
this node has not sent what the other side waited for.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Self

from dshealthd.core.host import read_bytes

STARVED = "starved"
"""The reason of what was observed without enough CPU."""
TICK = 0.1
"""Seconds between two looks at whether the loop runs; some 20 µs of CPU each second."""
LAG = 0.5
"""Seconds that a loop may run late. Answers take milliseconds and deadlines are 1 s or longer, so
that the rest of each is plenty.
"""
QUEUED = 1.0
"""Seconds on the run queue below which a process cannot have missed a deadline of 3 s or longer."""
SHARE = 2.0
"""Times its CPU time that a starved process has waited: it got less than a third of what it asked
for. One that sleeps, as a collective does whose peer is hung, neither runs nor waits.
"""


class LoopLag:
    """The longest delay of the running event loop, from its creation until it is closed."""

    def __init__(self) -> None:
        """Start to measure."""
        self._loop = asyncio.get_running_loop()
        self._longest = 0.0
        self._schedule()

    def __enter__(self) -> Self:
        """Measure in a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop at its end."""
        self.close()

    @property
    def longest(self) -> float:
        """The loop's longest delay in seconds, also one that lasts until now, its timer not yet
        run.
        """
        if self._timer.cancelled():
            return self._longest
        return max(self._longest, self._loop.time() - self._timer.when())

    @property
    def starved(self) -> bool:
        """Whether the event loop was late for too long to blame others for a timeout."""
        return self.longest > LAG

    def close(self) -> None:
        """Stop measuring the event loop's delays; what was measured stays."""
        self._longest = self.longest
        self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(TICK, self._look)

    def _look(self) -> None:
        self._longest = self.longest
        self._schedule()


class RunQueue(NamedTuple):
    """Seconds that a process's main thread had a CPU, and that it was ready to run and had none.

    The latter includes the time in which the quota of its cgroup was used up.
    """

    running: float
    waiting: float

    def since(self, before: RunQueue) -> RunQueue:
        """Return what came in addition of waiting for a CPU."""
        return RunQueue(self.running - before.running, self.waiting - before.waiting)

    @property
    def starved(self) -> bool:
        """Whether the child got too little CPU to meet a deadline."""
        return self.waiting > max(QUEUED, SHARE * self.running)


def parse_run_queue(data: bytes) -> RunQueue:
    """Return a process's wait for a CPU of `/proc/<pid>/schedstat`; ValueError if malformed."""
    running, waiting, _slices = map(int, data.split())
    return RunQueue(running / 1e9, waiting / 1e9)


def waited() -> float | None:
    """Return for how many seconds the calling thread was starved, ready to run without a CPU, since
    it began; None where the kernel does not tell.
    """
    try:
        return parse_run_queue(read_bytes("/proc/thread-self/schedstat", 4096)).waiting
    except (OSError, ValueError):
        return None


def run_queue(pid: int) -> RunQueue | None:
    """Return how long a child waited for a CPU; None where the kernel does not tell."""
    try:
        return parse_run_queue(read_bytes(f"/proc/{pid}/schedstat", 4096))
    except (OSError, ValueError):
        return None
