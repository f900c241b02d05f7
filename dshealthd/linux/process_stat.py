"""Parser of `/proc/<pid>/stat`, which the kernel answers without waiting for the process."""

from __future__ import annotations

import os
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second, the unit of the times below."""
_ENVIRONMENT, _EXIT_STATUS = 47, 49
"""Positions of fields shown since Linux 3.5, and only to users who may trace the process."""


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
    """Address of the environment, which changes with exec; 0 if access is denied."""
    cpu_ticks: int
    """CPU time of all its threads so far."""
    exit_status: int
    """As returned by waitpid(2); valid only once it has ended; 0 if access is denied."""

    @property
    def image(self) -> tuple[int, int]:
        """A key that stays the same as long as the process runs the same program."""
        return self.start, self.environment


def parse_stat(data: bytes) -> Stat:
    """Parse `/proc/<pid>/stat`; the process name may hold anything. ValueError if malformed."""
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
        message = f"not a process status: {data[:80]!r}"
        raise ValueError(message) from error
