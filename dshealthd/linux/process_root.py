"""Process files: the only way to open paths that a process or its user names.

Such paths come from the environment, argv or maps. Naming a path must gain its author nothing. A
file is looked up below the process's own root (openat2(2), Linux 5.6; ENOSYS on older kernels),
with the rights of the process's user and without capabilities, and opened as `regular_files` does.
Nothing on a FUSE mount of a user's is touched.

Any access may hang with its file system; callers run in processes that are killed when they hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from dshealthd.linux.credentials import User, assumed, is_secure, parse_user
from dshealthd.linux.mounts import mount_id, parse_fuse
from dshealthd.linux.regular_files import PROC, Checks, Irregular, check, file_system, read, reopen

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.core.host import Host


MAX_FILE = 1 << 20
MAX_NAMES = 20_000
"""Most entries of a directory that are read; the largest environments have some 2,000."""
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_MOUNTS = 4 << 20
"""Bytes of a process's list of mounts; a node with a thousand containers has about 1 MiB."""
_MAX_LINKS = 40
"""Most links in a path, as in the kernel (MAXSYMLINKS)."""
_SELF = "/proc/self"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class Root:
    """The file system as one process sees it, read with that process's rights.

    Paths are those of the process: absolute, or relative to its working directory. Links are
    followed, but never lead outside its root. Use in a `with` statement, or close.
    """

    def __init__(
        self,
        descriptor: int,
        owner: User,
        directory: str | None,
        served: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Take ownership of a root's descriptor, and read below it as `owner`.

        `served` are the mounts that users serve: their users by the mounts' IDs.
        """
        self._root = descriptor
        self._served = served
        self.owner = owner
        self._directory = directory

    @classmethod
    def of_process(cls, host: Host, pid: int) -> Self:
        """Return the root of a process; needs CAP_SYS_PTRACE for other users' processes.

        PermissionError if the process has the rights of more than one user, or has just changed its
        user. OSError; ValueError if the kernel's answer cannot be parsed.
        """
        place = os.open(host.proc(str(pid)), _DIRECTORY)
        try:
            owner = _owner(place)
            root = os.open("root", _DIRECTORY, dir_fd=place)
            self = cls(root, owner, _working_directory(place), _served(place, owner.uid))
            try:
                self._refuse_served(root, "/")
            except OSError:
                self.close()
                raise
            # Checked again, on the same descriptor: the process may have executed a set-user-ID
            # program between the first check and the opening of its root.
            if _owner(place) == owner:
                return self
            self.close()
            raise PermissionError(errno.EPERM, "the process has changed its user", str(pid))
        finally:
            os.close(place)

    @classmethod
    def of_owner(cls, root: Path, path: str) -> Self:
        """Return the node's root as the owner of a configured path sees it.

        The administrator configures the path, but its owner controls what is below it. An agent
        without privileges reads it as itself. OSError if the path does not exist.
        """
        self = cls(os.open(root, _DIRECTORY), _own(), "/")
        try:
            with self._found(path, follow=True) as descriptor:
                status = os.fstat(descriptor)
        except BaseException:
            self.close()
            raise
        self.owner = rights_of(status)
        return self

    @classmethod
    def of_user(cls, root: Path, owner: User) -> Self:
        """Return the node's root as seen by a user whose process has ended. OSError."""
        place = os.open(_SELF, _DIRECTORY)
        try:
            return cls(os.open(root, _DIRECTORY), owner, None, _served(place, owner.uid))
        finally:
            os.close(place)

    def close(self) -> None:
        """Close the process's root."""
        os.close(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def place(self) -> tuple[int, int, str | None, User]:
        """A key that is equal for processes to which equal paths name the same files."""
        status = os.fstat(self._root)
        return status.st_dev, status.st_ino, self._directory, self.owner

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        """Return the status of a process's path without opening it; None if absent. OSError."""
        try:
            with self._found(path, follow=follow) as descriptor:
                return os.fstat(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free(self, path: str) -> int | None:
        """Return the bytes available to users other than root at a process's path. OSError.

        None if its file system has no size, as a tmpfs without a limit and an object store have, or
        says that more is free than there is.
        """
        with self._found(path, follow=True) as descriptor:
            status = os.fstatvfs(descriptor)
            known = 0 < status.f_blocks >= status.f_bavail
            return status.f_bavail * status.f_frsize if known else None

    def link(self, path: str) -> str:
        """Return the target of a process's link; OSError (EINVAL, ENOENT) if there is none."""
        with self._found(path, follow=False) as descriptor:
            return os.readlink("", dir_fd=descriptor)

    def names(self, path: str, limit: int = MAX_NAMES) -> list[str]:
        """Return at most `limit` names in a directory below a process's root. OSError."""
        descriptor = self.open_directory(path)
        try:
            with os.scandir(descriptor) as entries:
                return [entry.name for entry in itertools.islice(entries, limit)]
        finally:
            os.close(descriptor)

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return the content of a process's regular file, at most `limit` bytes. OSError."""
        descriptor = self.open(path)
        try:
            return read(descriptor, limit)
        finally:
            os.close(descriptor)

    def refuse_served(self, path: str) -> None:
        """Raise PermissionError if an absolute path of a process leads to a mount that a user
        serves. OSError.
        """
        if self._served:
            with contextlib.suppress(FileNotFoundError), assumed(self.owner):
                self._walk(path, follow=True)

    def open(self, path: str) -> int:
        """Return a descriptor of a process's regular file, to read. OSError, `Irregular`."""
        return self.open_kind(path, os.O_RDONLY, stat.S_ISREG, "regular file")

    def open_directory(self, path: str) -> int:
        """Return a descriptor of a directory that a process names, to list. OSError."""
        return self.open_kind(path, os.O_RDONLY | os.O_DIRECTORY, stat.S_ISDIR, "directory")

    def open_kind(
        self,
        path: str,
        flags: int,
        is_kind: Checks,
        kind: str,
        *,
        follow: bool = True,
        owned: bool = False,
    ) -> int:
        """Return a descriptor of a file whose kind is checked before it is opened.

        If `owned`, it must belong to the process's user. `Irregular` if a check fails; OSError.
        Opens the object that was checked, wherever the path leads by then.
        """
        with self._found(path, follow=follow) as descriptor:
            check(descriptor, path, is_kind, kind)
            uid = os.fstat(descriptor).st_uid
            if owned and uid != self.owner.uid:
                raise Irregular(path, f"belongs to user {uid}, and the process to {self.owner.uid}")
            return reopen(descriptor, path, flags)

    @contextlib.contextmanager
    def _found(self, path: str, *, follow: bool) -> Iterator[int]:
        """Yield an O_PATH descriptor of a process's path, acting with its user's rights."""
        with assumed(self.owner):
            descriptor = self._resolve(path, follow=follow)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def _resolve(self, path: str, *, follow: bool) -> int:
        if self._directory is None and not path.startswith("/"):
            raise FileNotFoundError(errno.ENOENT, "the working directory is unknown", path)
        place = os.path.join(self._directory or "/", path)
        how = struct.pack(
            "=QQQ",
            os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW),
            0,
            _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS,
        )
        name = os.fsencode(place)
        if b"\0" in name:
            raise FileNotFoundError(errno.ENOENT, "a path cannot contain a null byte", path)
        if self._served:
            self._walk(place, follow=follow)
        size = ctypes.c_size_t(len(how))
        descriptor: int = _libc.syscall(_OPENAT2, self._root, name, how, size)
        if descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), place)
        return descriptor

    def _walk(self, place: str, *, follow: bool) -> None:
        """Raise PermissionError if a path leads to a mount that a user serves. OSError.

        Goes one name at a time, and touches nothing beyond the root of such a mount, which the
        kernel has in memory.
        """
        with contextlib.ExitStack() as opened:
            above, names, links = [self._root], place.split("/")[::-1], 0
            while names:
                name = names.pop()
                if name in ("", "."):
                    continue
                if name == "..":
                    above = above[:-1] or [self._root]
                    continue
                here = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above[-1])
                opened.callback(os.close, here)
                self._refuse_served(here, place)
                if not stat.S_ISLNK(os.fstat(here).st_mode):
                    above.append(here)
                elif follow or names:
                    if (links := links + 1) > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place)
                    target = os.readlink("", dir_fd=here)
                    above = [self._root] if target.startswith("/") else above
                    names += target.split("/")[::-1]

    def _refuse_served(self, descriptor: int, path: str) -> None:
        """Raise PermissionError if a descriptor's mount is one that a user serves."""
        if self._served and (user := self._served.get(mount_id(descriptor))) is not None:
            why = f"is on a FUSE mount of user {user}, which is not read"
            raise PermissionError(errno.EACCES, why, path)


def rights_of(status: os.stat_result) -> User:
    """Return the user to open a file with this status as: its owner, if the agent is root."""
    return User(status.st_uid, status.st_gid) if os.geteuid() == 0 else _own()


def _own() -> User:
    return User(os.geteuid(), os.getegid(), tuple(os.getgroups()))


def _owner(place: int) -> User:
    """Return the user of the process with this directory in `/proc`, to open its files as."""
    if file_system(place) != PROC:  # a fixture in place of procfs
        status = os.fstat(place)
        return User(status.st_uid, status.st_gid)
    user = parse_user(_entry(place, "status"))
    if user.uid == 0 and is_secure(_entry(place, "auxv")):
        raise PermissionError(errno.EPERM, "the process was given root's rights by another user")
    return user


def _entry(place: int, name: str, limit: int = 1 << 20) -> bytes:
    """Return the content of a process's file in `/proc`, at most `limit` bytes."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=place)
    try:
        return read(descriptor, limit)
    finally:
        os.close(descriptor)


def _served(place: int, uid: int) -> dict[int, int]:
    """Return the mounts that users serve among those of a process, given its place in `/proc` and
    its user.
    """
    try:
        mounts = _entry(place, "mountinfo", _MOUNTS)
    except FileNotFoundError:  # a fixture in place of procfs
        return {}
    if len(mounts) == _MOUNTS:  # made by a user, to hide one beyond the limit
        raise PermissionError(errno.EACCES, "the process has too many mounts")
    found = parse_fuse(mounts)
    served = {one.mount: one.user for one in found if one.user}
    if len(served) < len(found) and not _shares_users(place):
        # In a user namespace any user can be root and mount. What the node's root has mounted is
        # mounted here too.
        with open(f"{_SELF}/mountinfo", "rb") as own:
            known = {one.device for one in parse_fuse(own.read()) if not one.user}
        served |= {one.mount: uid for one in found if not one.user and one.device not in known}
    return served


def _shares_users(place: int) -> bool:
    """Return whether a process, given its place in `/proc`, is in this one's user namespace."""
    try:
        return os.readlink("ns/user", dir_fd=place) == os.readlink(f"{_SELF}/ns/user")
    except FileNotFoundError:  # a kernel without them
        return True


def _working_directory(place: int) -> str | None:
    """Return a process's working directory as seen from its root; None if outside it."""
    try:
        directory = os.readlink("cwd", dir_fd=place)
        root = os.readlink("root", dir_fd=place)
    except OSError:
        return None
    if root == "/" or not directory.startswith("/"):
        return directory if directory.startswith("/") else None
    if directory != root and not directory.startswith(f"{root}/"):
        return None
    return directory.removeprefix(root) or "/"
