"""Hyperscan's compiled literals, kept in the user's cache from one `explain` to the next.

A compiled database is a kind of code, so a file is only used if no other user can have written it:
it is below the home in the password database, not in an environment variable; no symbolic link
leads to it; the path is owned and writable by this user only; and its checksum matches. A database
that cannot be kept is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_BYTES = 1 << 24
"""Maximum bytes of a file; one with 300 literals has 350 KiB."""
_FOLDERS = (".cache", "dshealthd-explain")
_DIGEST = 32
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotKept(Exception):
    """There is no such file that can be trusted, or no place to keep it."""


def load(name: str, home: str | None = None) -> bytes:
    """Return the compiled literals kept under a name. NotKept says why there are none."""
    with _folder(home) as folder, _reported(name):
        descriptor = os.open(name, _READ, dir_fd=folder)
        with open(descriptor, "rb") as file:
            _own(descriptor, name, stat.S_ISREG)
            data = file.read(MAX_BYTES + 1)
    digest, payload = data[:_DIGEST], data[_DIGEST:]
    if len(data) > MAX_BYTES or hashlib.sha256(payload).digest() != digest:
        message = f"{name}: not whole"
        raise NotKept(message)
    return payload


def save(name: str, payload: bytes, home: str | None = None) -> None:
    """Keep compiled literals under a name atomically; NotKept says why that failed.

    Files of other releases are removed.
    """
    with _folder(home) as folder, _reported(name):
        temporary = f"{name}.{os.getpid()}"
        descriptor = os.open(temporary, _WRITE, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            for other in os.listdir(folder):
                if other != name:
                    os.unlink(other, dir_fd=folder)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise


@contextlib.contextmanager
def _folder(home: str | None) -> Iterator[int]:
    """Open the cache folder of the compiled literals, creating it if needed."""
    with contextlib.ExitStack() as closing, _reported("~/.cache/dshealthd-explain"):
        path = home or pwd.getpwuid(os.geteuid()).pw_dir
        descriptor = os.open(path, _FOLDER)
        closing.callback(os.close, descriptor)
        _own(descriptor, path, stat.S_ISDIR)
        for name in _FOLDERS:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=descriptor)
            descriptor = os.open(name, _FOLDER, dir_fd=descriptor)
            closing.callback(os.close, descriptor)
            _own(descriptor, name, stat.S_ISDIR)
        yield descriptor


def _own(descriptor: int, name: str, is_kind: Callable[[int], bool]) -> None:
    status = os.fstat(descriptor)
    if (
        not is_kind(status.st_mode)
        or status.st_uid != os.geteuid()
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        message = f"{name}: not this user's alone"
        raise NotKept(message)


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError) as error:  # no such user, no home, no room
        message = f"{name}: {error}"
        raise NotKept(message) from error
