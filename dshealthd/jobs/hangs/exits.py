"""The exits of ranks' processes: which came first, and whether by error, by signal or normally.

A pidfd (pidfd_open(2)) reports the exit of its process at once. The exit status can be read until
the parent reaps the process; a launcher does so some ten times a second. So the rank that failed
first is known, although the launcher ends the others within a fraction of a second. Since Linux
6.15 the pidfd has the status even after that, for an agent that had to wait for a CPU.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from dshealthd.linux.activity import ThreadState, activity
from dshealthd.linux.process import exit_status

if TYPE_CHECKING:
    import asyncio

    from dshealthd.core.host import Host

T = TypeVar("T")

KEPT = 600.0
"""Seconds for which the ends of a job's ranks are reported after the last of them, and longer while
another rank waits, unless the job goes on with another process.

They are forgotten together, never the first one alone: the rest would appear to be first.
"""
_ASKED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
)
"""Signals that schedulers, launchers and people send to end a job in an orderly way."""
_BY_SIGNAL = 128
"""Offset of exit statuses of programs that exit because of a signal that they handle."""
AT_ONCE = 1.0
"""Seconds within which the order of ends says little: a rank whose peer is killed fails within
milliseconds, and an agent without a CPU notices either end late.
"""
FAILURES: Mapping[str, str] = {
    "failed": "ended with an error",
    "killed": "was killed (SIGKILL)",
    "crashed": "crashed (a signal such as SIGSEGV or SIGABRT)",
}
"""Ends that are failures, in words. A process that was asked to end is none, nor is one that nobody
saw end: where the parent waits for it, as slurmstepd does, its status is gone at once.
"""


class ExitKind(enum.StrEnum):
    """How a process ended."""

    ENDED = "ended"
    """It exited with status 0."""
    FAILED = "failed"
    """It exited with another status, usually after an exception."""
    TERMINATED = "terminated"
    """A scheduler's or launcher's termination signal ended it, or it handled one and exited with
    the status that shells and Python programs use for that, 128 plus the signal's number.
    """
    KILLED = "killed"
    """SIGKILL ended it, from the kernel (out of memory) or from somebody."""
    CRASHED = "crashed"
    """Another signal ended it, such as a segmentation fault or an abort."""
    UNKNOWN = "unknown"


def first_end(
    ends: Sequence[tuple[float, T]], how_of: Callable[[T], str | None], at_once: float = AT_ONCE
) -> tuple[float, T]:
    """Return the end that the others follow from, as `dshealthd:job:rank_ended` has it: the first,
    or, if that is an error, a SIGKILL less than `at_once` seconds later. Errors follow from it, and
    not it from them.
    """
    at, one = first = min(ends, key=itemgetter(0))
    if how_of(one) != ExitKind.FAILED:
        return first
    killed = [end for end in ends if how_of(end[1]) == ExitKind.KILLED and end[0] < at + at_once]
    return min(killed, key=itemgetter(0), default=first)


def how(status: int) -> ExitKind:
    """Return how a process ended, from its status as returned by waitpid(2)."""
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGKILL:
            return ExitKind.KILLED
        return ExitKind.TERMINATED if os.WTERMSIG(status) in _ASKED else ExitKind.CRASHED
    code = os.WEXITSTATUS(status)
    if code - _BY_SIGNAL in _ASKED:
        return ExitKind.TERMINATED
    return ExitKind.FAILED if code else ExitKind.ENDED


def read_exit(host: Host, pid: int, start: int, descriptor: int = -1) -> ExitKind | None:
    """Return how a process exited, from its entry in `/proc`, or from its pidfd if its parent has
    reaped it; UNKNOWN if neither tells, None while it runs or cannot be read.
    """
    try:
        found = activity(host, pid, start)
    except (OSError, ValueError, ArithmeticError):
        return None
    if found is not None:
        gone = found.state in {ThreadState.ZOMBIE, ThreadState.GONE}
        return how(found.exit_status) if gone else None
    status = None if descriptor < 0 else exit_status(descriptor)
    return ExitKind.UNKNOWN if status is None else how(status)


@dataclass(frozen=True, slots=True)
class End:
    """The end of a process."""

    how: ExitKind
    at: float
    """Unix time in seconds at which it was noticed."""


class ExitWatcher:
    """A watcher for the exits of processes, in the agent's own loop."""

    def __init__(
        self, host: Host, loop: asyncio.AbstractEventLoop, wall: Callable[[], float]
    ) -> None:
        """Start without processes. `host` must show the same pids as this process sees."""
        self._host = host
        self._loop = loop
        self._wall = wall
        self._followed: dict[tuple[int, int], int] = {}
        """Descriptors by pid and start."""
        self._ended: dict[tuple[int, int], End] = {}

    def follow(self, pid: int, start: int) -> None:
        """Start watching for the exit of a process, if not done already.

        Without pidfds (before Linux 5.3) its exit is noticed later, by `end`.
        """
        key = pid, start
        if key in self._followed or key in self._ended:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it is gone, or there are no descriptors left: `end` checks by itself
            return
        if read_exit(self._host, pid, start) is ExitKind.UNKNOWN:  # the pid was reused
            os.close(descriptor)
            return
        self._followed[key] = descriptor
        self._loop.add_reader(descriptor, self._record, key)

    def end(self, pid: int, start: int) -> End | None:
        """Return how the process exited; None while it runs as far as is known."""
        key = pid, start
        if key not in self._ended and key not in self._followed:
            found = read_exit(self._host, pid, start)
            if found is not None:
                self._ended[key] = End(found, self._wall())
        return self._ended.get(key)

    def forget(self, pid: int, start: int) -> None:
        """Stop watching a process."""
        self._release((pid, start))
        self._ended.pop((pid, start), None)

    def close(self) -> None:
        """Stop watching all processes."""
        for key in list(self._followed):
            self._release(key)

    def _record(self, key: tuple[int, int]) -> None:
        found = read_exit(self._host, *key, self._followed[key]) or ExitKind.UNKNOWN
        self._release(key)
        self._ended[key] = End(found, self._wall())

    def _release(self, key: tuple[int, int]) -> None:
        descriptor = self._followed.pop(key, None)
        if descriptor is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(descriptor)
            os.close(descriptor)
