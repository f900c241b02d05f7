"""Files whose paths a training process names: opened below that process's own root, as its user, and checked to be its user's."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.host import Host

_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A file is there, and is not what it should be."""


class Root:
    """The file system as one process sees it: a container's, where it runs in one."""

    def __init__(self, host: Host, pid: int) -> None:
        """Take hold of the process's root and of its working directory; to be done before letting go of privileges. OSError."""
        self._root = os.open(host.proc(f"{pid}/root"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.directory = os.readlink(host.proc(f"{pid}/cwd"))

    def open(self, path: str, flags: int) -> int:
        """Return a descriptor of a file by its path in there; no link in the path leads out, and the last part may be no link. OSError."""
        place = os.path.join(self.directory, path)
        how = struct.pack("=QQQ", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        descriptor: int = _libc.syscall(_OPENAT2, self._root, os.fsencode(place), how, ctypes.c_size_t(len(how)))
        if descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), place)
        return descriptor

    def look(self, path: str) -> os.stat_result | None:
        """Return what is at a path without opening it; None if nothing is. OSError."""
        try:
            descriptor = self.open(path, os.O_PATH)
        except FileNotFoundError:
            return None
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def open_checked(self, path: str, flags: int, uid: int, is_kind: Checks, kind: str) -> int:
        """Return a descriptor of a file that is of a kind and belongs to a user; `Refused` if it is not, OSError.

        It is looked at before it is opened, as to open a device can do something, and again after.
        """
        found = self.look(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        _check(found, path, uid, is_kind, kind)
        descriptor = self.open(path, flags | os.O_NONBLOCK)
        try:
            _check(os.fstat(descriptor), path, uid, is_kind, kind)
        except Refused:
            os.close(descriptor)
            raise
        return descriptor


if TYPE_CHECKING:
    from collections.abc import Callable

    Checks = Callable[[int], bool]


def _check(found: os.stat_result, path: str, uid: int, is_kind: Checks, kind: str) -> None:
    if not is_kind(found.st_mode):
        message = f"{path} is no {kind}"
        raise Refused(message)
    if found.st_uid != uid:
        message = f"{path} belongs to user {found.st_uid}, and the rank to {uid}"
        raise Refused(message)
