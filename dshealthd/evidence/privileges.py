"""Letting go of privileges in a process that touches what belongs to others.

Whatever is read of a rank is read as the rank's own user, so that no link that this user makes leads further than the user's own rights.
What is taken apart is taken apart as nobody.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.host import read_bytes

if TYPE_CHECKING:
    from dshealthd.host import Host

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 38, 47, 2
CAP_SYS_PTRACE = 19
_CAPSET = 126 if os.uname().machine == "x86_64" else 91
"""Number of capset(2); 91 on all architectures since x86."""
_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class User(NamedTuple):
    """Whose a process is."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


NOBODY = User(65534, 65534)


def parse_user(status: bytes) -> User:
    """Return the user of `/proc/<pid>/status`, by which files are opened; ValueError if it is not told."""
    lines = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    try:
        return User(int(lines[b"Uid"].split()[3]), int(lines[b"Gid"].split()[3]), tuple(map(int, lines[b"Groups"].split())))
    except (KeyError, IndexError, ValueError) as error:
        message = "no user in the process status"
        raise ValueError(message) from error


def user_of(host: Host, pid: int) -> User:
    """Return whose a process is; OSError if it is gone."""
    return parse_user(read_bytes(host.proc(f"{pid}/status"), 1 << 16))


def become(user: User, *, keep_ptrace: bool = False) -> None:
    """Become a user for good, where one may; without privileges one stays who one is, and the kernel says what that user may not.

    `keep_ptrace` keeps the right to read other processes' memory, through exec too, where there is one to keep.
    """
    if os.geteuid() != 0 or user.uid == 0:
        return
    if keep_ptrace:
        _prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    if keep_ptrace and _capset(1 << CAP_SYS_PTRACE):
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_PTRACE)
    elif keep_ptrace:
        _capset(0)


def end_with_parent() -> None:
    """Have this process killed when its parent ends; to be called after `become`, which takes that back."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def seclude(descriptor: int) -> None:
    """Let go of all descriptors but the standard ones and this one, and of the ways to get new privileges."""
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1 << 30)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def confine(memory: int, seconds: int) -> None:
    """Allow this process no file, no process, and so many bytes of memory and seconds of CPU time."""
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
    """Have these capabilities and no others; False where one has not got them."""
    header = struct.pack("=Ii", _VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    return bool(_libc.syscall(_CAPSET, header, struct.pack("=6I", low, low, low, high, high, high)) == 0)
