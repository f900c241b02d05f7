"""Measures what a claim about time is about: the time that passed, less what other work took."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time


def _threads(pid: int) -> list[int]:
    """Return the threads of a process; none once it has been reaped."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _waited(thread: int) -> float:
    """Return how long a thread was ready to run and had no CPU, in seconds; 0 once it has ended.
    The second number of schedstat (the kernel's Documentation/scheduler/sched-stats.rst).
    """
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{thread}/schedstat", encoding="ascii") as schedstat,
    ):
        return int(schedstat.read().split()[1]) / 1e9
    return 0.0


def _stolen() -> list[float]:
    """Return how long the host kept each CPU from this machine, in seconds (proc_stat(5))."""
    with open("/proc/stat", encoding="ascii") as stat:
        lines = [line.split() for line in stat if line.startswith("cpu")]
    return [int(fields[8]) / os.sysconf("SC_CLK_TCK") for fields in lines[1:]]


class Stopwatch:
    """Runs while the threads that it watches do: it stops while one waits for a CPU.

    An agent that answers within a second on a machine of its own may take two beside other work.
    The bound of a test is on the agent, so the other work is taken out. Work on the disk is not.
    """

    def __init__(self, *pids: int) -> None:
        """Start it, for the calling thread and all threads of each of these processes. All of them,
        as a thread that waits for a CPU may hold the lock that the others wait for.
        """
        self._pids = pids
        self._waited = self._waits()
        self._stolen = _stolen()
        self._started = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far; to be called by the thread that started it."""
        passed = time.monotonic() - self._started
        steals = zip(_stolen(), self._stolen, strict=True)
        other = sum(
            max(0.0, now - self._waited.get(thread, 0.0)) for thread, now in self._waits().items()
        )
        other += max((now - then for now, then in steals), default=0.0)
        return max(0.0, passed - other)

    def _waits(self) -> dict[int, float]:
        """Return how long each thread has waited for a CPU since it began."""
        threads = {threading.get_native_id(), *itertools.chain(*map(_threads, self._pids))}
        return {thread: _waited(thread) for thread in threads}
