"""`/proc/<pid>/stat` parsed, which the kernel answers without waiting for the process."""

from __future__ import annotations

import os
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks in a second, in which the kernel counts what follows."""
_ENVIRONMENT, _EXIT_STATUS = 47, 49
"""Places of what is shown since Linux 3.5, and to those alone who may trace the process."""


class Stat(NamedTuple):
    """A process at one moment."""

    state: str
    """The kernel's letter: R, S, D, T, t, Z, X, I."""
    parent: int
    """Pid of its parent: 1, or a subreaper's, once the parent is gone."""
    flags: int
    start: int
    """Clock ticks from boot to start; with the pid, this is what makes a process unique."""
    environment: int
    """Address of the environment, which changes with exec; 0 where one may not know."""
    cpu_ticks: int
    """Time of all its threads on a CPU so far."""
    exit_status: int
    """As waitpid(2) returns it; meant of one that has ended only, and 0 where one may not know."""

    @property
    def image(self) -> tuple[int, int]:
        """What stays the same while the process is the same and runs the same program."""
        return self.start, self.environment


def parse_stat(data: bytes) -> Stat:
    """Return what `/proc/<pid>/stat` says; its name may hold anything. ValueError if malformed."""
    fields = data[data.rfind(b")") + 1 :].split()
    try:
        return Stat(
            state=fields[0].decode("ascii"),
            parent=int(fields[1]),
            flags=int(fields[6]),
            start=int(fields[19]),
            environment=int(fields[_ENVIRONMENT]) if len(fields) > _ENVIRONMENT else 0,
            cpu_ticks=int(fields[11]) + int(fields[12]),
            exit_status=int(fields[_EXIT_STATUS]) if len(fields) > _EXIT_STATUS else 0,
        )
    except (IndexError, ValueError) as error:
        message = f"no process status: {data[:80]!r}"
        raise ValueError(message) from error
