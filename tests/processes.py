"""What the kernel tells of processes, which may end at any time."""

from __future__ import annotations

from pathlib import Path

from tests.waiting import until


def _stat(pid: int) -> list[str]:
    """Return what /proc/PID/stat has from the state on; nothing where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def state(pid: int) -> str:
    """Return the letter of a process's state; empty when there is none."""
    return next(iter(_stat(pid)), "")


def runs(pid: int) -> bool:
    """Tell whether there is a process, and not only its remains."""
    return state(pid) not in "ZX"


def start_time(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 when it no longer runs."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process; none if it is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return list(map(int, text.split()))


def command(pid: int) -> list[str]:
    """Return the words of a process's command line; none if it is gone, or while the kernel works
    on its exec.
    """
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.split("\0")[:-1]


def wait_for_environment(pid: int) -> None:
    """Wait until the environment of a process that is to sleep can be read, and it sleeps.

    A parent goes on while the kernel still works on its child's exec; until that is done the
    child's environment is empty, and who looks at it then sees no rank. While its code is read from
    a disk it is in state D, in which the environment of a rank is left alone.
    """
    environment = Path(f"/proc/{pid}/environ")
    until(lambda: environment.read_bytes() and state(pid) == "S")
