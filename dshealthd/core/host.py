"""The host as files: the roots of `/proc`, `/sys` and `/dev`, reading of small files, and whether
a file has changed since it was read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dshealthd.core.options import option

MAX_FILE = 1 << 20
"""Most bytes that are read of a small file, which those of the kernel are."""
_CHUNK = 1 << 16
Signature = tuple[int, ...]
"""Only compared for equality."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Roots of the file systems that describe a machine.

    Its methods take paths relative to a root.
    """

    procfs: Path = option(Path("/proc"), "Where procfs is mounted.")
    sysfs: Path = option(Path("/sys"), "Where sysfs is mounted.")
    dev: Path = option(Path("/dev"), "Where the device files are.")
    rootfs: Path = option(
        Path("/"),
        "Mount point of the host's root file system; absolute paths in the configuration are "
        "below it.",
    )

    def proc(self, path: str) -> str:
        """Return the path of a file below `/proc`."""
        return f"{self.procfs}/{path}"

    def sys(self, path: str) -> str:
        """Return the path of a file below `/sys`."""
        return f"{self.sysfs}/{path}"

    def device(self, path: str) -> str:
        """Return the path of a file below `/dev`."""
        return f"{self.dev}/{path}"

    def root(self, path: str) -> str:
        """Return the path of an absolute path of the host."""
        return os.path.join(self.rootfs, path.lstrip("/"))


def read(path: str, limit: int = MAX_FILE) -> str:
    """Return the text of a small file, at most `limit` bytes; undecodable bytes are replaced.

    Raise OSError as `open(2)` and `read(2)` do.
    """
    return read_bytes(path, limit).decode(errors="replace")


def read_bytes(path: str, limit: int = MAX_FILE) -> bytes:
    """Return a small file's content, at most `limit` bytes, in as few system calls as possible."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        chunks = []
        while limit > 0:
            chunk = os.read(descriptor, min(limit, _CHUNK))
            if not chunk:
                break
            chunks.append(chunk)
            limit -= len(chunk)
    finally:
        os.close(descriptor)
    return b"".join(chunks)


def read_existing(path: str, limit: int = MAX_FILE) -> str | None:
    """Return the text of a small file; None if there is no such file, as on some kernels.
    OSError.
    """
    try:
        return read(path, limit)
    except FileNotFoundError:
        return None


def regular(path: str | os.PathLike[str]) -> str:
    """Return the path of a regular file that somebody has named; OSError if it is anything else.

    To open a FIFO waits for a writer, and to open a device may do something.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fspath(path)


def read_named(path: str | os.PathLike[str], limit: int = 16 << 20) -> bytes:
    """Return the content of a regular file that somebody has named.

    OSError, also for anything else, and for more than `limit` bytes.
    """
    content = read_bytes(regular(path), limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit} bytes", os.fspath(path))
    return content


def lines_of(text: str) -> list[str]:
    """Return the lines of a kernel file, which ends each with a line feed.

    `str.splitlines()` ends one at ten other characters too, which the kernel leaves as they are in
    the names that users give: of mount points, of programs.
    """
    return text.removesuffix("\n").split("\n") if text else []


def integer(path: str, text: str | bytes, base: int = 10) -> int:
    """Return the integer in a kernel file's text; otherwise raise ValueError with its path."""
    try:
        return int(text, base)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {text[:40]!r} is not a number") from error


def signature(status: os.stat_result) -> Signature:
    """Return a value that differs if a file was replaced, or its content or mode changed.

    It includes the change time (ctime): a writer in place can set the modification time back
    (`cp -p`, `touch -d`), and the size may be the same.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def signatures(paths: Iterable[str | os.PathLike[str]]) -> tuple[Signature | None, ...]:
    """Return each file's signature; None for one without readable metadata. May block."""
    return tuple(map(_signature_of, paths))


def _signature_of(path: str | os.PathLike[str]) -> Signature | None:
    try:
        return signature(os.stat(path))
    except OSError:
        return None
