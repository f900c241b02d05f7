"""Regular files: opened only once they are known to be files, on a file system that stores files.

Opening a FIFO waits for its writer, opening a device has side effects, and files of the kernel may
never end. The object that was checked is opened, wherever its path leads by then.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable

Checks = Callable[[int], bool]
PROC = 0x9FA0
_NO_STORE = frozenset(
    (PROC, 0x62656572, 0x64626720, 0x74726163, 0x27E0EB, 0x63677270, 0xCAFE4A11, 0x73636673)
)
"""proc, sysfs, debugfs, tracefs, cgroup, cgroup2, bpf, securityfs (`linux/magic.h`).

Reading there can have side effects, never end, or describe the reader instead of the process.
"""
_CHUNK = 1 << 18


class Irregular(OSError):
    """The object at a path must not be opened: a device, a link, another user's."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EINVAL, why, path)

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_entry(directory: int, name: str) -> int:
    """Return a regular file in an open directory, with the caller's rights, by no link. OSError."""
    return _open_file(name, os.O_NOFOLLOW, directory)


def open_named(path: str) -> int:
    """Return a descriptor of a regular file that whoever runs a command has named. OSError.

    Its directory may be a user's: a FIFO there would block the command, and a device be opened.
    """
    return _open_file(path, 0, None)


def _open_file(name: str, flags: int, directory: int | None) -> int:
    descriptor = os.open(name, flags | os.O_PATH | os.O_CLOEXEC, dir_fd=directory)
    try:
        check(descriptor, name, stat.S_ISREG, "regular file")
        return reopen(descriptor, name, os.O_RDONLY)
    finally:
        os.close(descriptor)


def read(descriptor: int, limit: int) -> bytes:
    """Return the rest of a process's file, at most `limit` bytes, even if it grows."""
    chunks = []
    while chunk := os.read(descriptor, min(limit, _CHUNK)):
        chunks.append(chunk)
        limit -= len(chunk)
    return b"".join(chunks)


def check(descriptor: int, path: str, is_kind: Checks, kind: str) -> None:
    """Raise `Irregular` if an O_PATH descriptor is of another kind, or nothing stores its file.

    `is_kind` takes the mode of stat(2); `kind` names it.
    """
    status = os.fstat(descriptor)
    # What is on a block device is stored there; only the C library tells the type of others.
    if not is_kind(status.st_mode) or (
        not os.major(status.st_dev) and file_system(descriptor) in _NO_STORE
    ):
        raise Irregular(path, f"is not a {kind}")


def reopen(descriptor: int, path: str, flags: int) -> int:
    """Open the object of an O_PATH descriptor of a process's file; errors name `path`."""
    # Through the descriptor that was checked, not the path, whose owner may have replaced the file
    # since. O_NONBLOCK, as opening a FIFO would wait for a writer.
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def file_system(descriptor: int) -> int:
    """Return the type of a file's file system: `f_type` of fstatfs(2)."""
    import ctypes  # which takes longer to import than `explain` reads most logs

    data = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None, use_errno=True).fstatfs(descriptor, data):
        code = ctypes.get_errno()
        raise OSError(code, f"fstatfs: {os.strerror(code)}")
    return int.from_bytes(data.raw[:8], sys.byteorder) & 0xFFFFFFFF
