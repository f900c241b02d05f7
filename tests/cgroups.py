"""Control groups for tests: limits of their own for processes of a test, of either version."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path("/sys/fs/cgroup")


class Group:
    """One control group."""

    def __init__(self, directory: Path, *, unified: bool) -> None:
        self.directory = directory
        self.unified = unified

    def add(self, pid: int) -> None:
        """Move a process into it; what it starts from then on is in it, too."""
        (self.directory / "cgroup.procs").write_text(str(pid))

    def limit_memory(self, size: int) -> None:
        """Allow its processes so many bytes together."""
        name = "memory.max" if self.unified else "memory.limit_in_bytes"
        (self.directory / name).write_text(str(size))

    def limit_processes(self, count: int) -> None:
        """Allow so many processes and threads."""
        (self.directory / "pids.max").write_text(str(count))


@contextlib.contextmanager
def group(controller: str) -> Iterator[Group]:
    """Make a group with a controller, below this process's own; skips where that is not permitted.
    Its processes must have ended by the end.
    """
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    unified = (ROOT / "cgroup.controllers").exists()
    base = ROOT if unified else ROOT / controller
    mine = next((path for _, names, path in own if controller in names.split(",")), own[-1][2])
    directory = base / mine.lstrip("/") / f"dshealthd-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        needed = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}
        if not any((directory / name).exists() for name in needed[controller]):
            pytest.skip(f"the controller {controller} is not to be had here")
        yield Group(directory, unified=unified)
    finally:
        remove(directory)


def remove(group: Path) -> None:
    """Remove a control group, whose processes may end just now."""

    def removed() -> bool:
        group.rmdir()
        return True

    until(removed, errors=(OSError,))
