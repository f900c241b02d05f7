"""Measures what a claim about time is about: the time that passed, less what other work took."""

from __future__ import annotations

import contextlib
import os
import time


def _waited(path: str) -> float:
    """Return how long a thread was ready to run and had no CPU, in seconds; 0 once it has ended.

    The second number of schedstat (the kernel's Documentation/scheduler/sched-stats.rst).
    """
    with contextlib.suppress(OSError), open(path, encoding="ascii") as schedstat:
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
        """Start it, for the calling thread and the main thread of each of these processes."""
        self._paths = ["/proc/thread-self/schedstat", *(f"/proc/{pid}/schedstat" for pid in pids)]
        self._waited = [_waited(path) for path in self._paths]
        self._stolen = _stolen()
        self._started = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far; to be called by the thread that started it."""
        passed = time.monotonic() - self._started
        waits = zip(map(_waited, self._paths), self._waited, strict=True)
        steals = zip(_stolen(), self._stolen, strict=True)
        other = sum(max(0.0, now - then) for now, then in waits)
        other += max((now - then for now, then in steals), default=0.0)
        return max(0.0, passed - other)
