"""Checks of paths given on the command line: checkpoint and offload directories.

Each runs in its own process with the owner's rights: an NFS export may refuse root what it allows
the owner.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.collectors import filesystem
from dshealthd.doctor.check import Check, Result, critical, ok
from dshealthd.doctor.snapshot_check import result_of
from dshealthd.findings import catalogue, storage
from dshealthd.findings.options import FindingsOptions
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.linux.credentials import assumed
from dshealthd.linux.process_root import Root

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext
    from dshealthd.findings.limits import Limits

_BLOCK = b"dshealthd write test\n".ljust(4096, b".")


def path_check(path: str) -> Check[NodeContext]:
    """Return the check of one directory given on the command line."""

    def run(context: NodeContext) -> Iterator[Result]:
        try:
            with Root.of_owner(context.host.rootfs, path) as root:
                directory = root.open_directory(path)
                try:
                    status = os.fstatvfs(directory)
                    with assumed(root.owner):
                        seconds = _write(directory)
                finally:
                    os.close(directory)
        except OSError as error:
            word = shlex.quote(path)
            yield critical(
                f"{path}: {error.strerror or error}",
                remedy=f"df -h {word}; mount | grep -F {word}; ls -ld {word}",
                component=path,
            )
            return
        yield from _judge(path, status, seconds, context.config.section(FindingsOptions).limits)

    return Check("checkpoint-path", f"path {path}", f"{path} is writable", run)


def _write(directory: int) -> float:
    """Create, write, sync and remove a file at the checked path; return the seconds. OSError."""
    name = f".dshealthd-doctor-{os.uname().nodename}-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    started = time.monotonic()
    descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        os.write(descriptor, _BLOCK)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)
    return time.monotonic() - started


def _judge(path: str, status: os.statvfs_result, seconds: float, limit: Limits) -> Iterator[Result]:
    """Yield the findings of the agent about such a path, as they are without a past."""
    free = status.f_bavail * status.f_frsize
    samples = (
        filesystem.SIZE(status.f_blocks * status.f_frsize, path),
        filesystem.FREE(free, path),
        filesystem.FILES(status.f_files, path),
        filesystem.FILES_FREE(status.f_favail, path),
        filesystem.WRITE_SECONDS(seconds, path),
    )
    series = Series(samples, limit, Past())
    signs = [sign for rule in storage.RULES for sign in rule(series, 0.0)]
    for sign in signs:
        yield result_of(catalogue.finding_of(sign, os.uname().nodename, limit))
    if not signs:
        text = f"{path}: wrote 4 KiB in {seconds * 1e3:.2g} ms, {free / 1e9:.1f} GB are free"
        yield ok(text, component=path)
