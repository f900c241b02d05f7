"""The exits of ranks' processes: which was the first, by an error, by a signal or of its own
accord.

The kernel tells of the end of a process at once where one holds a descriptor of it (pidfd_open(2)),
and how it ended can be read for as long as its parent has not asked: a launcher asks some ten times
a second. So the rank that took the others with it is known, which their launcher ends within a
fraction of a second. Since Linux 6.15 the descriptor tells it afterwards too, to an agent that had
to wait for a CPU.
"""

from __future__ import annotations

import enum
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.jobs.hangs.activity import ThreadState, activity
from dshealthd.linux.pidfd import exit_status

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from dshealthd.core.host import Host

_ASKED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
)
"""What schedulers, launchers and people send to end a job in order."""
_BY_SIGNAL = 128
"""What a program that handles a signal adds to its number for its exit status."""


class ExitKind(enum.StrEnum):
    """How a process ended."""

    ENDED = "ended"
    """By itself, with exit status 0."""
    FAILED = "failed"
    """With another exit status: an exception, as a rule."""
    TERMINATED = "terminated"
    """By a signal that asks to end, from a scheduler or a launcher; or it handled one and said so
    with the exit status that shells and Python programs use for that, 128 and the signal's number.
    """
    KILLED = "killed"
    """By SIGKILL: the kernel, out of memory, or somebody."""
    CRASHED = "crashed"
    """By another signal: a segmentation fault, an abort."""
    UNKNOWN = "unknown"


def how(status: int) -> ExitKind:
    """Return how a rank's process exited whose status this is, as waitpid(2) has it."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number:
        return (
            ExitKind.KILLED
            if number == signal.SIGKILL
            else ExitKind.TERMINATED
            if number in _ASKED
            else ExitKind.CRASHED
        )
    code = os.WEXITSTATUS(status)
    if code - _BY_SIGNAL in _ASKED:
        return ExitKind.TERMINATED
    return ExitKind.FAILED if code else ExitKind.ENDED


@dataclass(frozen=True, slots=True)
class End:
    """The end of a process."""

    how: ExitKind
    at: float
    """Unix time in seconds at which it was noticed."""


class ExitWatcher:
    """Waits for the ends of processes, in the agent's own loop."""

    def __init__(
        self, host: Host, loop: asyncio.AbstractEventLoop, wall: Callable[[], float]
    ) -> None:
        """Wait for none yet. `host` must show the pids that this process sees, too."""
        self._host = host
        self._loop = loop
        self._wall = wall
        self._followed: dict[tuple[int, int], int] = {}
        """Descriptors, by pid and start."""
        self._ended: dict[tuple[int, int], End] = {}

    def follow(self, pid: int, start: int) -> None:
        """Wait for the exit of a process, unless that is done already.

        Where the kernel cannot (before Linux 5.3) its end is seen later.
        """
        key = pid, start
        if key in self._followed or key in self._ended:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has gone, or there are no descriptors left: `end` looks for itself
            return
        if self._status(pid, start) is ExitKind.UNKNOWN:  # another process has the pid by now
            os.close(descriptor)
            return
        self._followed[key] = descriptor
        self._loop.add_reader(descriptor, self._note, key)

    def end(self, pid: int, start: int) -> End | None:
        """Return how the process exited; None while it runs, as far as is known."""
        key = pid, start
        if key not in self._ended and key not in self._followed:
            status = self._status(pid, start)
            if status is not None:
                self._ended[key] = End(status, self._wall())
        return self._ended.get(key)

    def forget(self, pid: int, start: int) -> None:
        """Wait for the exit of this process no longer."""
        self._release((pid, start))
        self._ended.pop((pid, start), None)

    def close(self) -> None:
        """Wait for no process's exit any longer."""
        for key in list(self._followed):
            self._release(key)

    def _note(self, key: tuple[int, int]) -> None:
        found = self._status(*key) or ExitKind.UNKNOWN
        if found is ExitKind.UNKNOWN:  # its parent has asked already
            status = exit_status(self._followed[key])
            found = found if status is None else how(status)
        self._release(key)
        self._ended[key] = End(found, self._wall())

    def _status(self, pid: int, start: int) -> ExitKind | None:
        """Return how a process exited, by what is left of it.

        None while it runs, or cannot be looked at.
        """
        try:
            found = activity(self._host, pid, start)
        except (OSError, ValueError):
            return None
        if found is None:
            return ExitKind.UNKNOWN
        return (
            how(found.exit_status)
            if found.state in {ThreadState.ZOMBIE, ThreadState.GONE}
            else None
        )

    def _release(self, key: tuple[int, int]) -> None:
        descriptor = self._followed.pop(key, None)
        if descriptor is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(descriptor)
            os.close(descriptor)
