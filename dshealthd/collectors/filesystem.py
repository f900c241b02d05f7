"""Space and inodes of configured paths, and a timed write test of a small file.

From `statvfs(2)` and by writing.

A path on a hung file system blocks its worker; the next worker reads the other paths.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Reason,
    Sample,
    SourceError,
    Worker,
    gauge,
)
from dshealthd.core.host import read
from dshealthd.core.options import Duration, option
from dshealthd.core.result import fault_of
from dshealthd.linux.mounts import Mount, mount_of, parse_mountinfo

SIZE = gauge(
    "dshealthd_filesystem_size_bytes",
    "Size of the file system that holds the path; absent if it has none. statvfs f_blocks.",
    "path",
)
FREE = gauge(
    "dshealthd_filesystem_free_bytes",
    "Space available to users other than root; absent where the size is. statvfs f_bavail.",
    "path",
)
FILES = gauge(
    "dshealthd_filesystem_files",
    "Inodes of the file system, used and free; absent if it creates them on demand. statvfs "
    "f_files.",
    "path",
)
FILES_FREE = gauge(
    "dshealthd_filesystem_files_free",
    "Inodes available to users other than root; statvfs f_favail.",
    "path",
)
READ_ONLY = gauge(
    "dshealthd_filesystem_read_only",
    "1 if mounted read-only or remounted read-only after an error, 0 if not; mountinfo.",
    "path",
)
INFO = gauge(
    "dshealthd_filesystem_info",
    "1; mountpoint of the file system that holds the path: / if the path's own mount is missing.",
    *("path", "mountpoint", "fstype"),
)
WRITABLE = gauge(
    "dshealthd_path_writable",
    "1 if the last write test of this path passed, 0 if it failed or hung. Only for paths "
    "with a write test.",
    "path",
)
WRITE_SECONDS = gauge(
    "dshealthd_path_write_seconds",
    "Duration of the last write test that passed: create, write 4 KiB, sync, remove.",
    "path",
)
FAILING = gauge(
    "dshealthd_path_failing",
    "1 while the path cannot be read or written, by reason.",
    *("path", "reason"),
)

WRITE_PART = "write "
"""Prefix of the part that the worker enters before a write test; the path follows.

It is a part of its own so that a hung write does not hide the path's space.
"""
_BLOCK = b"dshealthd write test\n".ljust(mmap.PAGESIZE, b".")
"""Less may lie in the inode, and need no space."""
_REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "quota_exceeded",
    errno.EROFS: "read_only",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.ESTALE: "stale_handle",
    errno.ETIMEDOUT: "timeout",
}
"""Label `reason`, else `io_error`; of a part that hangs, `timeout`, `stuck` or `crashed`."""

LOCATE = 60.0
"""Seconds until a path is resolved again, or sooner if a mount changes: links may move."""


@dataclass(frozen=True, kw_only=True)
class FilesystemOptions(CollectorOptions):
    """Which paths are checked."""

    deadline: Duration = option(
        "5s", "Timeout of each path and of each write test.", minimum="10ms"
    )
    paths: tuple[str, ...] = option(
        ["/", "/dev/shm"],  # noqa: S108 - shared memory
        "Paths whose file system is checked, below path.rootfs, such as checkpoint directories.",
    )
    write_test: tuple[str, ...] = option(
        [], "Directories in which to time the write, sync and removal of a small hidden file."
    )
    write_interval: Duration = option(
        "1m", "Time between write tests of a directory.", minimum="100ms"
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each invalid option of file systems, and why."""
        for name, paths in (("paths", self.paths), ("write_test", self.write_test)):
            if any(not path.startswith("/") for path in paths):
                yield name, "must be absolute paths"
            if len(set(paths)) < len(paths):
                yield name, "must not name a path twice"


class Filesystem(Collector):
    """Runs in a worker, because any access to a path can hang with its file system."""

    Options = FilesystemOptions
    worker = Worker.STORAGE
    parallel = True

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self._mountinfo = ""
        self._mounts: list[Mount] = []
        self._located: dict[str, tuple[float, Mount | None]] = {}
        """The mount of each path, and until when it is valid."""
        self._tested: dict[str, float] = {}
        self._written: dict[str, float | str] = {}

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the space of each path that can be read, then the write tests' results."""
        mounts_fault = self._read_mounts()
        if mounts_fault is not None:
            yield mounts_fault
        faults = []
        for path in self.options.paths:
            fault = self.context.entering(path)
            if fault is None:
                try:
                    yield from self._space(path)
                    continue
                except OSError as error:
                    yield FAILING(1, path, _reason(error))
                    fault = fault_of(path, error)
            else:
                yield FAILING(1, path, fault.reason)
            faults.append(fault)
            yield fault
        for path in self.options.write_test:
            yield from self._write_test(path)
        if self.options.paths and len(faults) == len(self.options.paths):
            raise SourceError(faults[0].reason, faults[0].detail)

    def _space(self, path: str) -> Iterator[Sample | Fault]:
        place = self.host.root(path)
        status = os.statvfs(place)
        if status.f_blocks:  # 0: a tmpfs without a limit, or an object store (mountpoint-s3's #710)
            yield SIZE(status.f_blocks * status.f_frsize, path)
        if 0 < status.f_blocks >= status.f_bavail:
            yield FREE(status.f_bavail * status.f_frsize, path)
        elif status.f_bavail:
            # A negative number, as some file systems that are full have (node_exporter's #1672).
            detail = f"statvfs: {status.f_bavail} of {status.f_blocks} blocks are free"
            yield Fault(path, Reason.MALFORMED, detail)
        if 0 < status.f_files >= status.f_favail:  # CephFS has more free than there are
            yield FILES(status.f_files, path)
            yield FILES_FREE(status.f_favail, path)
        mount = self._mount(path, place)
        if mount is not None:
            yield READ_ONLY(mount.read_only, path)
            yield INFO(1, path, mount.point, mount.kind)

    def _mount(self, path: str, place: str) -> Mount | None:
        """Return the mount of a configured path, which is `place` here; cached for `LOCATE`."""
        now = self.context.monotonic()
        until, mount = self._located.get(path, (-math.inf, None))
        if now >= until:
            root = str(self.host.rootfs).rstrip("/")
            above = os.path.realpath(root) if root else ""
            mount = mount_of(os.path.realpath(place).removeprefix(above) or "/", self._mounts)
            self._located[path] = now + LOCATE, mount
        return mount

    def _read_mounts(self) -> Fault | None:
        """Read the host's mounts from process 1, outside the agent's sandbox, or the worker's."""
        try:
            try:
                text = read(self.host.proc("1/mountinfo"), 1 << 24)
            except OSError:
                text = read(self.host.proc("self/mountinfo"), 1 << 24)
            if text != self._mountinfo:
                self._mounts = parse_mountinfo(text)
                self._mountinfo = text
                self._located.clear()
        except (OSError, ValueError, ArithmeticError) as error:
            return fault_of("mounts", error)
        return None

    def _write_test(self, path: str) -> Iterator[Sample | Fault]:
        """Yield the result of a directory's write test, run now if it is due, else the last."""
        now = self.context.monotonic()
        if path not in self._tested or now - self._tested[path] >= self.options.write_interval:
            fault = self.context.entering(WRITE_PART + path)
            if fault is not None:
                yield WRITABLE(0, path)
                yield FAILING(1, path, fault.reason)
                yield fault
                return
            self._tested[path] = now
            try:
                self._written[path] = self._write(self.host.root(path))
            except OSError as error:
                self._written[path] = _reason(error)
        outcome = self._written[path]
        yield WRITABLE(not isinstance(outcome, str), path)
        if isinstance(outcome, str):
            yield FAILING(1, path, outcome)
        else:
            yield WRITE_SECONDS(outcome, path)

    def _write(self, directory: str) -> float:
        """Create, write, sync and remove a test file; return the seconds it took. OSError."""
        # One name per node, as nodes may share the directory. The next test removes what a killed
        # worker left behind.
        place = f"{directory}/.dshealthd-write-test-{os.uname().nodename}"
        started = self.context.monotonic()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        descriptor = os.open(
            place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            try:
                if os.write(descriptor, _BLOCK) < len(_BLOCK):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        finally:
            os.unlink(place)
        return self.context.monotonic() - started


def _reason(error: OSError) -> str:
    return _REASONS.get(error.errno or 0, "io_error")
