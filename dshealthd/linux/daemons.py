"""Daemons of the system by their process names, from `/proc`."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from dshealthd.core.host import read, read_existing

if TYPE_CHECKING:
    from dshealthd.core.host import Host

_NAME = 15
"""Bytes at which the kernel cuts a process' name (proc(5), /proc/pid/comm)."""
_FIRST_USER = 1000
"""The first uid of people (login.defs(5), UID_MIN): some daemons have an account of their own."""


def daemon(host: Host, name: str, last: int | None = None) -> int | None:
    """Return the pid of the system's daemon of this name, None if it is not running.

    `last` is its last known pid, which costs two reads; a search costs two for each process.
    OSError if other users' processes, or those outside a container, cannot be seen.
    """
    if last is not None and _is_daemon(host, last, name):
        return last
    # The kernel starts pid 2 in its first PID namespace only; hidepid hides it from users.
    if (read_existing(host.proc("2/comm")) or "").strip() != "kthreadd":
        message = "the processes of the system cannot be seen (a container, or hidepid)"
        raise PermissionError(errno.EPERM, message, host.procfs)
    pids = (int(entry) for entry in os.listdir(host.procfs) if entry.isdecimal())
    return next((pid for pid in pids if _is_daemon(host, pid, name)), None)


def _is_daemon(host: Host, pid: int, name: str) -> bool:
    """Return whether a process is a daemon: by name and owner, as users can pick any name."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        place = host.proc(str(pid))
        named = read(f"{place}/comm").strip() == name[:_NAME]
        return named and os.stat(place).st_uid < _FIRST_USER
    return False
