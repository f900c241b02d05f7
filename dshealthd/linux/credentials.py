"""Credentials of a process, and opening files with the rights of another user in this thread.

`assumed` changes only what the kernel checks when opening files (fsuid, fsgid, groups,
capabilities). The thread keeps its real and effective IDs, so the user can neither signal nor trace
it. glibc's wrappers would change all threads, so this module makes the system calls itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
_X86 = os.uname().machine == "x86_64"
_SETGROUPS, _SETFSUID, _SETFSGID = (116, 122, 123) if _X86 else (159, 151, 152)
_CAPGET, _CAPSET = (125, 126) if _X86 else (90, 91)
"""System call numbers: of x86-64, and those shared by all newer architectures."""
_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_AT_NULL, _AT_SECURE = 0, 23
_ENTRY = struct.Struct("=QQ")
_libc = ctypes.CDLL(None, use_errno=True)


class User(NamedTuple):
    """Credentials of a process's user."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def parse_user(status: bytes) -> User:
    """Return the user whose credentials `/proc/<pid>/status` shows.

    PermissionError if its real, effective, saved and file system IDs differ: a set-user-ID program
    such as `su` has the rights of one user and the environment of another. ValueError if malformed.
    """
    lines = dict(line.split(b":", 1) for line in status.split(b"\n") if b":" in line)
    try:
        uids, gids = (set(map(int, lines[name].split())) for name in (b"Uid", b"Gid"))
        groups = tuple(map(int, lines[b"Groups"].split()))
    except (KeyError, ValueError, ArithmeticError) as error:
        raise ValueError("no user in the process status") from error
    if len(uids) != 1 or len(gids) != 1:
        raise PermissionError(errno.EPERM, "the process has the rights of more than one user")
    return User(uids.pop(), gids.pop(), groups)


def parse_real_user(status: bytes) -> int:
    """Return the real user from `/proc/<pid>/status`; ValueError if it is missing."""
    fields = status.partition(b"\nUid:")[2].split(None, 1)
    if not fields:
        raise ValueError("no user in the process status")
    return int(fields[0])


def is_secure(auxiliary: bytes) -> bool:
    """Return whether, by `/proc/<pid>/auxv`, the program gained rights when it was executed.

    True for `sudo` at its prompt: all its IDs are root's, but its environment is the user's.
    """
    for start in range(0, len(auxiliary) - _ENTRY.size + 1, _ENTRY.size):
        kind, value = _ENTRY.unpack_from(auxiliary, start)
        if kind == _AT_SECURE:
            return bool(value)
        if kind == _AT_NULL:
            break
    return False


@contextlib.contextmanager
def assumed(user: User) -> Iterator[None]:
    """Let this thread open files with the rights of a user and without capabilities.

    PermissionError if this is another user and CAP_SETUID or CAP_SETGID is missing.
    """
    effective, permitted, inheritable = capabilities()
    fsuid, fsgid, groups = _fs(_SETFSUID), _fs(_SETFSGID), os.getgroups()
    own = user.uid == fsuid and (user.gid, set(user.groups)) == (fsgid, set(groups))
    if not own and user.uid == fsuid == os.geteuid() != 0:
        own = True  # unprivileged: same user, so the current groups will do
    ends_with = _death_signal()
    try:
        if not own:
            _groups(user.groups)
            _fs(_SETFSGID, user.gid)
            _fs(_SETFSUID, user.uid)
            if (_fs(_SETFSUID), _fs(_SETFSGID)) != (user.uid, user.gid):
                raise PermissionError(errno.EPERM, f"may not act as user {user.uid}")
        if effective:
            set_capabilities(0, permitted, inheritable)
        yield
    finally:
        if effective:
            set_capabilities(effective, permitted, inheritable)
        if not own:
            _fs(_SETFSUID, fsuid)
            _fs(_SETFSGID, fsgid)
            if os.getgroups() != groups:
                _groups(groups)
            if effective:  # the kernel raises file capabilities with fsuid 0
                set_capabilities(effective, permitted, inheritable)
        if ends_with:  # a change of fsuid clears it
            _libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(ends_with), 0, 0, 0)


def _fs(call: int, new: int = 0xFFFFFFFF) -> int:
    """Set this thread's fsuid or fsgid, and return the previous one; errors are not reported."""
    return int(_libc.syscall(call, ctypes.c_uint(new))) & 0xFFFFFFFF


def _groups(groups: tuple[int, ...] | list[int]) -> None:
    array = (ctypes.c_uint * len(groups))(*groups)
    _check(_libc.syscall(_SETGROUPS, ctypes.c_size_t(len(groups)), array), "setgroups")


def _death_signal() -> int:
    """Return this thread's death signal, sent when its parent ends; 0 for none."""
    number = ctypes.c_int(0)
    _check(_libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0), "prctl")
    return number.value


def capabilities() -> tuple[int, int, int]:
    """Return this thread's effective, permitted and inheritable capabilities."""
    data = ctypes.create_string_buffer(24)
    header = struct.pack("=Ii", _VERSION, 0)
    _check(_libc.syscall(_CAPGET, header, data), "capget")
    words = struct.unpack("=6I", data.raw)
    return words[0] | words[3] << 32, words[1] | words[4] << 32, words[2] | words[5] << 32


def set_capabilities(*sets: int) -> None:
    """Set this thread's effective, permitted and inheritable capabilities. OSError."""
    header = struct.pack("=Ii", _VERSION, 0)
    words = [entry & 0xFFFFFFFF for entry in sets] + [entry >> 32 for entry in sets]
    _check(_libc.syscall(_CAPSET, header, struct.pack("=6I", *words)), "capset")


def _check(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
