"""The activity of a rank's process and of the thread that trains in it, from `/proc/<pid>/stat`,
`task/<tid>/stat`, `schedstat` and `wchan`.

Reading these never blocks on the process.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from dshealthd.core.host import Host, lines_of, read, read_bytes
from dshealthd.linux.process import TICKS, parse_stat
from dshealthd.linux.starvation import parse_run_queue

T = TypeVar("T")

BUSY = 0.5
"""Share of a core's time from which a rank is at work, unless its GPU waits in a kernel, for which
a host spins. What libraries run beside a training takes a tenth of it.
"""
IDLE_SHARE = 0.01
"""Share of a core's time below which the training's thread does nothing: one that blocks takes
none, one that polls fifty times a second a tenth of it, and one that decodes 10 MB/s three times as
much.
"""
IDLE_BYTES = 1e4
"""Bytes per second up to which a job counts as idle: stores, monitors and loggers move a tenth."""
FILE_SYSTEMS = (
    *("request_wait_answer", "fuse_", "p9_", "rpc_", "nfs", "smb", "cifs", "wait_for_response"),
    *("ceph", "ptlrpc_", "ldlm_", "cl_sync", "ll_", "cxiWait"),
)
"""Prefixes of the kernel's functions in which threads wait for a file system's server although a
signal would wake them, so that their state is S: FUSE (which is in D only until its first answer),
9p, NFS, SMB, Ceph, Lustre, Spectrum Scale. Named after the kernel's sources.
"""
MAX_THREADS = 256
"""Most threads of a process that are looked at: some 20 µs each."""
_FREEZER = ("do_freezer_trap", "get_signal")
"""The kernel's functions in which a thread sleeps that cgroup v2's freezer has stopped: some
compilers merge the one into the other, in which nothing else sleeps but what a signal or debugger
has stopped.
"""


class ThreadState(enum.StrEnum):
    """State of a process's main thread."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked"
    """In uninterruptible sleep in the kernel, or waiting there for a file system to answer."""
    STOPPED = "stopped"
    """Stopped by a signal, or by its cgroup's freezer, as Slurm suspends jobs and container
    runtimes pause."""
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
    """Time for which its training's thread was runnable without a CPU so far; None if unknown."""
    thread_seconds: float | None = None
    """CPU time of the training's thread alone; None if unknown."""

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


def activity(host: Host, pid: int, start: int, thread: int | None = None) -> Activity | None:
    """Return the activity of the process with this pid and start; None if it is gone.

    `thread` is the one that trains, by default the main one. The state is the thread's, unless the
    process has ended. ValueError, OSError if it cannot be read.
    """
    place = host.proc(str(pid))
    try:
        found = parse_activity(read_bytes(f"{place}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if found.start != start:
        return None
    if found.state in {ThreadState.ZOMBIE, ThreadState.GONE}:
        return found
    task = f"{place}/task/{thread or pid}"
    try:
        of_thread = parse_activity(read_bytes(f"{task}/stat"))
        state = of_thread.state
        if state is ThreadState.SLEEPING:
            where = _waits_in(task)
            state = (
                ThreadState.BLOCKED
                if where.startswith(FILE_SYSTEMS)
                else ThreadState.STOPPED
                if where in _FREEZER
                else state
            )
        elif state is ThreadState.BLOCKED and _is_frozen(host, pid):
            state = ThreadState.STOPPED
        found = replace(found, state=state, thread_seconds=of_thread.cpu_seconds)
        queue = parse_run_queue(read_bytes(f"{task}/schedstat"))
        return replace(found, queued_seconds=queue.waiting)
    except (OSError, ValueError, ArithmeticError):
        # A kernel without schedstat, or the thread has just ended.
        return found


def demands(host: Host, pid: int) -> dict[int, float]:
    """Return the seconds for which each thread ran or waited for a CPU so far, where readable."""

    def demand(place: str) -> tuple[int, float]:
        queue = parse_run_queue(read_bytes(f"{place}/schedstat"))
        return int(os.path.basename(place)), queue.running + queue.waiting

    return dict(_of_threads(host, pid, demand))


def busiest(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the seconds of `demands` of the thread that had most of them meanwhile: one that
    computes is runnable all the time, however little CPU it gets, and what polls is not, however
    many threads do.
    """
    rises = (seconds - before.get(thread, seconds) for thread, seconds in after.items())
    return max(rises, default=0.0)


def waits_for_storage(host: Host, pid: int) -> bool:
    """Return whether a thread of a process is in uninterruptible sleep, or waits for a file system,
    as one that flushes a file does; False if none can be read.
    """

    def waits(place: str) -> bool:
        state = parse_activity(read_bytes(f"{place}/stat")).state
        return state is ThreadState.BLOCKED or (
            state is ThreadState.SLEEPING and _waits_in(place).startswith(FILE_SYSTEMS)
        )

    return any(_of_threads(host, pid, waits))


def _of_threads(host: Host, pid: int, read: Callable[[str], T], *first: str) -> Iterator[T]:
    """Yield what `read` returns for the directory of each thread that can be read, of `first`
    before the others.
    """
    place = host.proc(f"{pid}/task")
    # Not by listdir, which has the kernel walk all threads before the first is looked at.
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for thread in (*first, *(entry.name for entry in itertools.islice(entries, MAX_THREADS))):
            with contextlib.suppress(OSError, ValueError, ArithmeticError):  # it has ended
                yield read(f"{place}/{thread}")


def _waits_in(place: str) -> str:
    """Return the kernel's function in which a thread waits; empty if that is denied."""
    try:
        return read_bytes(f"{place}/wchan").decode(errors="replace").strip()
    except OSError:
        return ""


def _is_frozen(host: Host, pid: int) -> bool:
    """Return whether cgroup v1's freezer has stopped a process, which is then in state D, or is
    about to: it is FREEZING for as long as one of the group waits in the kernel.
    """
    with contextlib.suppress(OSError):
        for line in lines_of(read(host.proc(f"{pid}/cgroup"))):
            _, controllers, path = line.split(":", 2)
            if controllers == "freezer":
                return read(host.sys(f"fs/cgroup/freezer{path}/freezer.state")).strip() != "THAWED"
    return False


def thread_of(host: Host, pid: int, told: int) -> int:
    """Return the thread of a process that numbers it `told` in its own pid namespace; its main
    thread if there is none, or not among the MAX_THREADS that are looked at.
    """

    def numbered(place: str) -> tuple[int, int]:
        for line in read_bytes(f"{place}/status").split(b"\n"):
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1]), int(os.path.basename(place))
        raise ValueError(f"{place}/status has no NSpid")

    if not told:
        return pid
    # In the agent's own namespace it has that number here too, however many threads come before.
    threads = _of_threads(host, pid, numbered, str(told))
    return next((thread for number, thread in threads if number == told), pid)
