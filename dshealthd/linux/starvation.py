"""Starvation: whether this node was too busy to observe others, as its loop or a child got no CPU.

A deadline that passes meanwhile says nothing about the other side: its answer may have arrived, or
this node may not have sent what the other side was waiting for.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from dshealthd.core.host import read_bytes

STARVED = "starved"
"""Reason of observations made without enough CPU."""
TICK = 0.1
"""Seconds between checks that the loop runs; costs some 20 µs of CPU per second."""
LAG = 0.5
"""Seconds that a loop may run late: answers take milliseconds, deadlines are 1 s or longer."""
QUEUED = 1.0
"""Seconds on the run queue below which a process cannot have missed a deadline of 3 s or longer."""
SHARE = 2.0
"""Ratio of waiting to running time above which a process is starved: it got less than a third of
the CPU it wanted. A sleeping process, such as a collective whose peer is hung, neither runs nor
waits.
"""


class LoopLag:
    """The longest delay of the running event loop, from its creation until it is closed."""

    def __init__(self) -> None:
        import asyncio  # 4 MiB in each worker that reads run queues alone

        self._loop = asyncio.get_running_loop()
        self._longest = 0.0
        self._schedule()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def longest(self) -> float:
        """The loop's longest delay in seconds, including one still in progress."""
        if self._timer.cancelled():
            return self._longest
        return max(self._longest, self._loop.time() - self._timer.when())

    @property
    def starved(self) -> bool:
        """Whether the event loop ran too late to blame others for a timeout."""
        return self.longest > LAG

    def close(self) -> None:
        """Stop measuring the event loop's delays; keep the result."""
        self._longest = self.longest
        self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(TICK, self._measure)

    def _measure(self) -> None:
        self._longest = self.longest
        self._schedule()


class RunQueue(NamedTuple):
    """Seconds that a process's main thread was running, and that it was runnable without a CPU.

    The latter includes time in which the CPU quota of its cgroup was used up.
    """

    running: float
    waiting: float

    def since(self, before: RunQueue) -> RunQueue:
        """Return the running and waiting time since an earlier reading."""
        return RunQueue(self.running - before.running, self.waiting - before.waiting)

    @property
    def starved(self) -> bool:
        """Whether the child got too little CPU to meet a deadline."""
        return self.waiting > max(QUEUED, SHARE * self.running)


def parse_run_queue(data: bytes) -> RunQueue:
    """Parse `/proc/<pid>/schedstat`: a process's CPU time and wait. ValueError if malformed."""
    running, waiting, _slices = map(int, data.split())
    return RunQueue(running / 1e9, waiting / 1e9)


def run_queue(pid: int | str) -> RunQueue | None:
    """Return how long a process ran and waited for a CPU; None if the kernel does not report it."""
    try:
        return parse_run_queue(read_bytes(f"/proc/{pid}/schedstat"))
    except (OSError, ValueError, ArithmeticError):
        return None


def starved_seconds() -> float | None:
    """Return the seconds for which this thread was runnable without a CPU; None if unknown."""
    queue = run_queue("thread-self")
    return None if queue is None else queue.waiting
