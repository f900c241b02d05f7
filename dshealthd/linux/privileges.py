"""Dropping privileges in a process that touches other users' files.

A rank's files are read as the rank's own user, so that a symlink made by this user leads no further
than the user's own rights. Untrusted data is parsed as user nobody.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

from dshealthd.core.host import read
from dshealthd.linux.credentials import PR_SET_PDEATHSIG, User, set_capabilities

PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 38, 47, 2
CAP_SYS_PTRACE = 19
_libc = ctypes.CDLL(None, use_errno=True)


NOBODY = User(65534, 65534)


def become(user: User, *, keep_ptrace: bool = False) -> None:
    """Become a user for good, without other privileges, if this process is root.

    Without root it stays who it is, and the kernel enforces that user's limits. No program that it
    runs gains any.

    `keep_ptrace` keeps the right to read other processes' memory, also across exec, if this process
    has it.
    """
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() != 0 or user.uid == 0:
        return
    if keep_ptrace:
        _prctl(PR_SET_KEEPCAPS, 1)
    # Groups and gid first: they cannot be changed without root's uid.
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    if keep_ptrace and _capset(1 << CAP_SYS_PTRACE):
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_PTRACE)
    elif keep_ptrace:
        # PR_SET_KEEPCAPS has kept all permitted capabilities, not only this one.
        _capset(0)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; `become` clears that."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(memory: int) -> None:
    """Limit this process to `memory` more bytes than it has; beyond that, MemoryError."""
    pages = int(read("/proc/self/statm").split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def confine(memory: int, seconds: int) -> None:
    """Forbid new files and processes; limit further memory (bytes) and CPU time."""
    limit_memory(memory)
    for what, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc.prctl(option, *values):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")


def _capset(mask: int) -> bool:
    """Reduce this process to these capabilities; False if it does not have them."""
    try:
        set_capabilities(mask, mask, mask)
    except OSError:
        return False
    return True
