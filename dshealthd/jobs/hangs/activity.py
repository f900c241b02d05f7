"""The activity of a rank's process, from `/proc/<pid>/stat` and `schedstat`, which never wait for
it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dshealthd.core.host import read_bytes
from dshealthd.linux.process_stat import TICKS, parse_stat
from dshealthd.linux.starvation import parse_run_queue

if TYPE_CHECKING:
    from dshealthd.core.host import Host


class ThreadState(enum.StrEnum):
    """State of a process's main thread."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked"
    """It waits in the kernel and cannot be interrupted."""
    STOPPED = "stopped"
    """By a signal."""
    TRACED = "traced"
    """By a debugger."""
    ZOMBIE = "zombie"
    """It has ended, and its parent has not asked how."""
    GONE = "gone"
    """There is no such process any more."""
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
    """What a process does, and what it has done."""

    state: ThreadState
    start: int
    """Clock ticks from boot to its start."""
    cpu_seconds: float
    """Time of all its threads on a CPU so far."""
    exit_status: int
    """As waitpid(2) returns it; meant of one that has ended only, and 0 where one may not know."""
    queued_seconds: float | None = None
    """Time for which its main thread was ready to run and had no CPU so far.

    None where the kernel does not tell.
    """

    @property
    def work_seconds(self) -> float:
        """Time for which the process computed, or would have with enough CPUs."""
        return self.cpu_seconds + (self.queued_seconds or 0.0)


def parse_activity(data: bytes) -> Activity:
    """Return the activity that `/proc/<pid>/stat` says; ValueError if malformed."""
    stat = parse_stat(data)
    return Activity(
        _STATES.get(stat.state, ThreadState.UNKNOWN),
        stat.start,
        stat.cpu_ticks / TICKS,
        stat.exit_status,
    )


def activity(host: Host, pid: int, start: int) -> Activity | None:
    """Return the activity of the process that has this pid and start; None if it is gone.

    ValueError, OSError if it cannot be known.
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
    except (OSError, ValueError):
        # A kernel without it, or the process has just ended, which its state tells.
        return found
