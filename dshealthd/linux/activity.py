"""The activity of a rank's process, from `/proc/<pid>/stat` and `schedstat`.

Reading these never blocks on the process.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dshealthd.core.host import read_bytes
from dshealthd.linux.process import TICKS, parse_stat
from dshealthd.linux.starvation import parse_run_queue

if TYPE_CHECKING:
    from dshealthd.core.host import Host


class ThreadState(enum.StrEnum):
    """State of a process's main thread."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked"
    """In uninterruptible sleep in the kernel."""
    STOPPED = "stopped"
    """Stopped by a signal."""
    TRACED = "traced"
    """Stopped by a debugger."""
    ZOMBIE = "zombie"
    """It has exited and its parent has not reaped it."""
    GONE = "gone"
    """The process does not exist."""
    UNKNOWN = "unknown"


_STATES = {
    "R": ThreadState.RUNNING,
    "S": ThreadState.SLEEPING,
    "I": ThreadState.SLEEPING,
    "D": ThreadState.BLOCKED,
    "T": ThreadState.STOPPED,
    "t": ThreadState.TRACED,
    "Z": ThreadState.ZOMBIE,
    "X": ThreadState.GONE,
}


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process does, and has done so far."""

    state: ThreadState
    start: int
    """Clock ticks from boot to its start."""
    cpu_seconds: float
    """CPU time of all its threads so far."""
    exit_status: int
    """As returned by waitpid(2); only valid after exit, and 0 without permission to see it."""
    queued_seconds: float | None = None
    """Time for which its main thread was runnable without a CPU so far; None if unknown."""

    @property
    def work_seconds(self) -> float:
        """Time for which the process computed, or would have computed with enough CPUs."""
        return self.cpu_seconds + (self.queued_seconds or 0.0)


def parse_activity(data: bytes) -> Activity:
    """Return the activity in a `/proc/<pid>/stat`; ValueError if malformed."""
    stat = parse_stat(data)
    return Activity(
        _STATES.get(stat.state, ThreadState.UNKNOWN),
        stat.start,
        stat.cpu_ticks / TICKS,
        stat.exit_status,
    )


def activity(host: Host, pid: int, start: int) -> Activity | None:
    """Return the activity of the process with this pid and start; None if it is gone.

    ValueError, OSError if it cannot be read.
    """
    try:
        found = parse_activity(read_bytes(host.proc(f"{pid}/stat"), 4096))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if found.start != start:
        return None
    try:
        queue = parse_run_queue(read_bytes(host.proc(f"{pid}/schedstat"), 4096))
        return replace(found, queued_seconds=queue.waiting)
    except (OSError, ValueError, ArithmeticError):
        # A kernel without schedstat, or the process has just ended, which its state shows.
        return found
