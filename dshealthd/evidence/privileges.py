"""Letting go of privileges in a process that touches what belongs to others.

Whatever is read of a rank is read as the rank's own user, so that no link that this user makes
leads further than the user's own rights. What is taken apart is taken apart as nobody.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct

from dshealthd.core.host import read
from dshealthd.linux.credentials import User

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = (
    1,
    8,
    38,
    47,
    2,
)
CAP_SYS_PTRACE = 19
_CAPSET = 126 if os.uname().machine == "x86_64" else 91
"""Number of capset(2); 91 on all architectures since x86."""
_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


NOBODY = User(65534, 65534)


def become(user: User, *, keep_ptrace: bool = False) -> None:
    """Become a user for good, without other privileges, where one may.

    Without privileges one stays who one is, and the kernel says what that user may not.

    `keep_ptrace` keeps the right to read other processes' memory, through exec too, where there is
    one to keep.
    """
    if os.geteuid() != 0 or user.uid == 0:
        return
    if keep_ptrace:
        _prctl(PR_SET_KEEPCAPS, 1)
    # Groups and gid first: without root's uid they cannot be changed any more.
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    if keep_ptrace and _capset(1 << CAP_SYS_PTRACE):
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_PTRACE)
    elif keep_ptrace:
        # PR_SET_KEEPCAPS has kept all permitted capabilities, not this one alone.
        _capset(0)


def end_with_parent() -> None:
    """Have this unprivileged process killed when its parent ends.

    To be called after `become`, which takes that back.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def seclude(descriptor: int) -> None:
    """Let go of all descriptors but the standard ones and this, and of new privileges."""
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1 << 30)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def limit_memory(memory: int) -> None:
    """Allow this process so many bytes of memory beyond what it has; MemoryError from then on."""
    pages = int(read("/proc/self/statm").split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def confine(memory: int, seconds: int) -> None:
    """Allow this process no file, no process, and so many bytes of memory and seconds of CPU."""
    for what, limit in (
        (resource.RLIMIT_AS, memory),
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
    """Have these capabilities and no other privileges; False where one has not got them."""
    header = struct.pack("=Ii", _VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    return bool(
        _libc.syscall(_CAPSET, header, struct.pack("=6I", low, low, low, high, high, high)) == 0
    )
