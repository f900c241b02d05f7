"""Limits of a process, and what it uses of them."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterable
from typing import NamedTuple

from dshealthd.core.host import Host, read_bytes


class ProcessLimits(NamedTuple):
    """Soft limits of a process; infinity if there is none."""

    files: float
    locked: float
    """Bytes."""


class Usage(NamedTuple):
    """A process's use of a resource, and its limit."""

    value: float
    limit: float

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: closest to the limit last; among unused ones, the lower limit last."""
        return (self.value / self.limit if self.limit else math.inf, -self.limit)


def parse_limits(data: bytes) -> ProcessLimits:
    """Return the soft limits of `/proc/<pid>/limits`; ValueError if one is missing."""
    return ProcessLimits(_limit(data, b"\nMax open files "), _limit(data, b"\nMax locked memory "))


def _limit(data: bytes, name: bytes) -> float:
    soft = data.partition(name)[2].split(None, 1)[:1]
    if not soft:
        raise ValueError(f"no line{name.decode()}in the limits")
    return math.inf if soft[0] == b"unlimited" else int(soft[0])


def parse_locked(data: bytes) -> tuple[int, int]:
    """Return the locked and pinned bytes of `/proc/<pid>/status`; 0 without memory."""
    locked, pinned = (
        data.partition(name)[2].split(None, 1)[:1] or [b"0"] for name in (b"\nVmLck:", b"\nVmPin:")
    )
    return int(locked[0]) * 1024, int(pinned[0]) * 1024


class Descriptors:
    """Counts the descriptors of processes, and reads their limits, with the fewest system calls
    that this kernel and procfs allow.
    """

    def __init__(self, host: Host) -> None:
        """Detect what this kernel and procfs support. OSError without a free descriptor."""
        self._proc = str(host.procfs)
        own = f"{self._proc}/self"
        try:
            # Since Linux 6.2 the size of this directory is the number of descriptors; elsewhere it
            # is 0, or a file system's own number.
            self.direct = (
                os.stat(f"{own}/fd").st_size in (count := len(os.listdir(f"{own}/fd")), count - 1)
                and count > 1
            )
            # Otherwise its pids belong to another namespace, or to a fixture.
            self._own_pids = os.readlink(own) == str(os.getpid())
        except FileNotFoundError:  # a fixture in place of procfs
            self.direct = self._own_pids = False

    def open_descriptors(self, pid: int | str) -> int:
        """Return the number of open descriptors of a process.

        OSError. Without `direct`, other users' processes need CAP_SYS_PTRACE.
        """
        if self.direct:
            return os.stat(f"{self._proc}/{pid}/fd").st_size
        return len(os.listdir(f"{self._proc}/{pid}/fd"))

    def limits(self, pid: int | str) -> ProcessLimits:
        """Return a process's soft limits. OSError as for `open(2)`; ValueError if malformed."""
        if self._own_pids:
            try:
                return ProcessLimits(
                    _soft(int(pid), resource.RLIMIT_NOFILE),
                    _soft(int(pid), resource.RLIMIT_MEMLOCK),
                )
            except PermissionError:
                pass  # another user's: without CAP_SYS_RESOURCE only the file may be read
        return parse_limits(read_bytes(f"{self._proc}/{pid}/limits"))

    def open_files(self, pid: int | str) -> Usage:
        """Return a process's open descriptors and soft limit, or raise as their readers do."""
        return Usage(self.open_descriptors(pid), self.limits(pid).files)

    def worst(self, pids: Iterable[str]) -> tuple[str, Usage] | None:
        """Return the process closest to its limit of open files; None if none could be read.

        Skip processes that cannot be read, such as those that have ended, and those beyond their
        limit: they have lowered it themselves, to open nothing more, as sshd's sandbox does.
        """
        worst, nearest = None, -1.0
        for pid in pids:
            try:
                usage = self.open_files(pid)
            except (OSError, ValueError, ArithmeticError):
                continue
            if not 0 < usage.limit >= usage.value:
                continue
            ratio = usage.value / usage.limit
            if ratio > nearest:
                worst, nearest = (pid, usage), ratio
        return worst


def _soft(pid: int, which: int) -> float:
    soft, _ = resource.prlimit(pid, which)
    return math.inf if soft == resource.RLIM_INFINITY else soft
