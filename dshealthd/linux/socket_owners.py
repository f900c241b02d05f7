"""Owners of sockets, found by inode in `/proc/<pid>/fd`, some time in each round.

The environment of an owner is read, which waits while the process holds the lock of its memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator

from dshealthd.core.host import Host, read, read_bytes
from dshealthd.linux.process import Stat, parse_stat

BUDGET = 0.25
"""Seconds per round: some 50,000 descriptors."""
PATIENCE = 60.0
"""Seconds before an unsuccessful search is retried. Doubled each time, up to sixteen-fold."""
_SYSTEMD = ("systemd", "init")


def parse_inode(link: str) -> int | None:
    """Return the inode from a socket descriptor's link, `socket:[123]`; None for other links."""
    return int(link[8:-1]) if link.startswith("socket:[") else None


class Owner:
    """The process that owns a socket, watched for the loss of its parent."""

    def __init__(self, host: Host, pid: int, descriptor: str, inode: int) -> None:
        """Start watching a socket's process. Raises OSError or ValueError if it is gone."""
        self._host = host
        self._pid = pid
        self._descriptor = host.proc(f"{pid}/fd/{descriptor}")
        self._inode = inode
        self._first = self.process = self._read()
        self._parent_started_it = started_by(host, pid, self._first.parent)

    def refresh(self) -> bool:
        """Read the socket's owner again; False if it is gone or has closed the socket."""
        try:
            self.process = self._read()
            return (
                self.process.start == self._first.start
                and parse_inode(os.readlink(self._descriptor)) == self._inode
            )
        except (OSError, ValueError, ArithmeticError):
            return False

    @property
    def orphaned(self) -> bool | None:
        """Whether the process that started the owner is gone; None if unknown."""
        if self.process.parent != self._first.parent:
            return True
        return None if self._parent_started_it is None else not self._parent_started_it

    def _read(self) -> Stat:
        return parse_stat(read_bytes(self._host.proc(f"{self._pid}/stat")))


def started_by(host: Host, pid: int, parent: int) -> bool | None:
    """Return whether `parent`, with which a process is first seen, is the process that started it.

    None if that cannot be known; OSError if it cannot be read now, as without a free descriptor.

    Every parent is, except one that adopts orphans: systemd, the system's or a user's. systemd
    marks the processes that it starts itself with `SYSTEMD_EXEC_PID` (systemd 248). Any other
    process 1, as in containers, may have started or adopted the process.
    """
    if parent == 0:  # the first process of a container, or started from outside of it
        return True
    try:
        if read(host.proc(f"{parent}/comm")).strip() in _SYSTEMD:
            environment = read_bytes(host.proc(f"{pid}/environ"))
            return f"SYSTEMD_EXEC_PID={pid}".encode() in environment.split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if parent == 1 else True


class Search:
    """Searches for the owners of sockets, and keeps those found for as long as they are valid."""

    def __init__(
        self, host: Host, monotonic: Callable[[], float], enters: Callable[[int], bool]
    ) -> None:
        """`enters` announces a process that is read next, by its pid; False if it is left out."""
        self._host = host
        self._monotonic = monotonic
        self._enters = enters
        self._owners: dict[int, Owner] = {}
        self._pass: Generator[tuple[int, int, str] | None] | None = None
        self._sought: set[int] = set()
        self._vain: set[int] = set()
        self._patience = PATIENCE
        self._again = 0.0

    def owners(self, inodes: set[int]) -> dict[int, Owner]:
        """Return the known owners of these sockets after a search; forget all other sockets."""
        self._owners = {
            inode: owner
            for inode, owner in self._owners.items()
            if inode in inodes and owner.refresh()
        }
        missing = inodes - self._owners.keys()
        self._vain &= missing
        if not missing:
            self.close()
        else:
            self._search(missing, self._monotonic())
        return self._owners

    def close(self) -> None:
        """Close the directory that the search for sockets has open."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def _search(self, missing: set[int], now: float) -> None:
        if self._pass is None:
            if missing == self._vain and now < self._again:
                return
            self._pass, self._sought = self._descriptors(), set(missing)
        for found in self._pass:
            if found is not None and found[0] in missing:
                self._record(*found)
                missing -= self._owners.keys()
            if not missing:
                break
            if self._monotonic() - now > BUDGET:
                return
        vain = missing & self._sought  # the rest appeared after the pass began
        self._patience = min(2 * self._patience, 16 * PATIENCE) if vain == self._vain else PATIENCE
        self._vain, self._again = vain, now + self._patience
        self.close()

    def _record(self, inode: int, pid: int, descriptor: str) -> None:
        with contextlib.suppress(OSError, ValueError, ArithmeticError):  # it ended meanwhile
            if self._enters(pid):
                self._owners[inode] = Owner(self._host, pid, descriptor, inode)

    def _descriptors(self) -> Generator[tuple[int, int, str] | None]:
        """Yield inode, pid and descriptor of every socket, and None for each other entry read."""
        for pid in reversed(os.listdir(self._host.procfs)):  # jobs are younger than services
            if pid.isdecimal():
                yield None
                with contextlib.suppress(OSError):  # it has ended, or access is denied
                    yield from self._sockets(pid)

    def _sockets(self, pid: str) -> Generator[tuple[int, int, str] | None]:
        directory = os.open(
            self._host.proc(f"{pid}/fd"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    try:
                        link = os.readlink(entry.name, dir_fd=directory)
                    except FileNotFoundError:  # closed meanwhile
                        continue
                    inode = parse_inode(link)
                    yield None if inode is None else (inode, int(pid), entry.name)
        finally:
            os.close(directory)
