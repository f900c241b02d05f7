"""A process as the kernel shows it: state, files, exit; none of that waits for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from dshealthd.core.host import Host, read, read_bytes, read_existing
from dshealthd.core.result import read_parsed

TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second, the unit of the times below."""
_ENVIRONMENT, _EXIT_STATUS = 47, 49
"""Positions of fields shown since Linux 3.5, and only to users who may trace the process."""
_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h: `_IOWR(0xFF, 11, struct pidfd_info)`, of its first 64 bytes."""
_EXIT = 1 << 3
"""PIDFD_INFO_EXIT."""
_INFO = struct.Struct("=Q52xi")
"""The mask, unused fields, and `exit_code`."""
_KERNEL_THREAD = 0x0020_0000
"""PF_KTHREAD of linux/sched.h: kernel threads sleep this way whenever they are idle."""
_CHILDREN_LIMIT = 1 << 20
"""Bytes read of the list of kernel threads: some 150,000."""
_MAPPINGS = 16_384
"""Most mappings of a process that are looked at, some 10 ms; a training has a third of them."""
_CHUNK = 1 << 14
"""Bytes of the list of mappings that are read at a time."""
_NAME = 15
"""Bytes at which the kernel cuts a process' name (proc(5), /proc/pid/comm)."""
_FIRST_USER = 1000
"""The first uid of people (login.defs(5), UID_MIN): some daemons have an account of their own."""


def uptime(host: Host) -> float:
    """Return the seconds since boot, as of `/proc/uptime`. OSError; SourceError if malformed."""
    return read_parsed(host.proc("uptime"), lambda text: float(text.partition(" ")[0]))


class Stat(NamedTuple):
    """A process at one moment."""

    state: str
    """The kernel's letter: R, S, D, T, t, Z, X, I."""
    parent: int
    """Pid of its parent: 1, or a subreaper's, once the parent is gone."""
    flags: int
    start: int
    """Clock ticks from boot to start; with the pid, this is what makes a process unique."""
    environment: int
    """Address of the environment, which changes with exec; 0 if access is denied."""
    cpu_ticks: int
    """CPU time of all its threads so far."""
    exit_status: int
    """As returned by waitpid(2); valid only once it has ended; 0 if access is denied."""
    children_ticks: int = 0
    """CPU time of its children that have ended, and of theirs."""
    terminal: int = 0
    """Its controlling terminal; 0 if it has none."""

    @property
    def image(self) -> tuple[int, int]:
        """A key that stays the same as long as the process runs the same program."""
        return self.start, self.environment


def parse_stat(data: bytes) -> Stat:
    """Parse `/proc/<pid>/stat`; the process name may hold anything. ValueError if malformed."""
    fields = data[data.rfind(b")") + 1 :].split()
    try:
        return Stat(
            state=fields[0].decode("ascii"),
            parent=int(fields[1]),
            flags=int(fields[6]),
            start=int(fields[19]),
            environment=int(fields[_ENVIRONMENT]) if len(fields) > _ENVIRONMENT else 0,
            cpu_ticks=int(fields[11]) + int(fields[12]),
            exit_status=int(fields[_EXIT_STATUS]) if len(fields) > _EXIT_STATUS else 0,
            children_ticks=int(fields[13]) + int(fields[14]),
            terminal=int(fields[4]),
        )
    except (IndexError, ValueError, ArithmeticError) as error:
        raise ValueError(f"not a process status: {data[:80]!r}") from error


def exit_status(descriptor: int) -> int | None:
    """Return the status, as of waitpid(2), of a process that its parent has reaped.

    None while it is not reaped, and before Linux 6.15, which does not support this.
    """
    info = bytearray(_INFO.pack(_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:  # ENOTTY, EINVAL: an earlier kernel
        return None
    mask, status = _INFO.unpack(info)
    return int(status) if mask & _EXIT else None


class Sleep(NamedTuple):
    """One uninterruptible sleep of a process, as far as two samples can identify it."""

    pid: int
    start: int
    """Clock ticks from boot to the start of the process."""
    cpu_ticks: int
    """Its CPU time so far: if this grows, it has been awake in between."""


def sleeping(host: Host, kernel_threads: set[str]) -> set[Sleep] | None:
    """Return the processes in uninterruptible sleep, excluding kernel threads.

    `kernel_threads` are the pids of those found by earlier calls, which updates it: a large node
    has thousands, and they are not read again. None if `/proc` does not show other users'
    processes (hidepid). OSError.
    """
    pids = [entry for entry in os.listdir(host.procfs) if entry.isdecimal()]
    if "1" not in pids:
        return None
    found = set()
    kernel_threads &= _children_of_kthreadd(host)
    for pid in pids:
        if pid in kernel_threads:
            continue
        try:
            stat = parse_stat(read_bytes(host.proc(f"{pid}/stat")))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except PermissionError:
            return None
        if stat.flags & _KERNEL_THREAD:
            kernel_threads.add(pid)
        elif stat.state == "D":
            found.add(Sleep(int(pid), stat.start, stat.cpu_ticks))
    return found


def open_files(host: Host, pid: int) -> Iterator[str]:
    """Yield the target of each open descriptor of a process, one by one; only links are read.

    PermissionError; FileNotFoundError or ProcessLookupError if it has ended.
    """
    with os.scandir(host.proc(f"{pid}/fd")) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                yield os.readlink(entry.path)


def read_memory(place: str, address: int, size: int) -> bytes:
    """Return anonymous memory of a process, at most up to the end of its mapping; nothing if none
    is mapped at this address. `place` is its directory in `/proc`. OSError, ValueError.

    A page of a file may be one that a user serves (FUSE) and never delivers: its reader would sleep
    in the kernel, and no signal ends that. The kernel reads environments and command lines under
    the same condition (FOLL_ANON). A process that maps a file just after the check still hangs its
    reader.
    """
    end = _end_of_anonymous(place, address)
    memory = os.open(f"{place}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(memory, max(0, min(size, end - address)), address)
    finally:
        os.close(memory)


def _end_of_anonymous(place: str, address: int) -> int:
    """Return where the anonymous mapping at an address of a process ends; 0 if there is none."""
    with open(f"{place}/maps", "rb", buffering=_CHUNK) as maps:
        for line in itertools.islice(maps, _MAPPINGS):  # in the order of addresses
            region, _, _, device, inode = line.split(None, 5)[:5]
            start, end = (int(limit, 16) for limit in region.split(b"-"))
            if address < end:
                # A file system that a user serves may number a file 0, but has a device.
                is_anonymous = (device, inode) == (b"00:00", b"0")
                return end if start <= address and is_anonymous else 0
    return 0


def _children_of_kthreadd(host: Host) -> frozenset[str]:
    """Return the pids of the children of pid 2, which starts all kernel threads.

    Its children are also programs that the kernel runs, such as modprobe or a handler of core
    dumps. Empty if the kernel does not list them; some may be missing.
    """
    try:
        children = read_bytes(host.proc("2/task/2/children"), _CHILDREN_LIMIT)
    except OSError:
        return frozenset()
    return frozenset(children.decode(errors="replace").split())


def daemon(host: Host, name: str, last: int | None = None) -> int | None:
    """Return the pid of the system's daemon of this name, None if it is not running.

    `last` is its last known pid, which costs two reads; a search costs two for each process.
    OSError if other users' processes, or those outside a container, cannot be seen.
    """
    if last is not None and _is_daemon(host, last, name):
        return last
    # The kernel starts pid 2 in its first PID namespace only; hidepid hides it from users.
    if (read_existing(host.proc("2/comm")) or "").strip() != "kthreadd":
        message = "the processes of the system cannot be seen (a container, or hidepid)"
        raise PermissionError(errno.EPERM, message, host.procfs)
    pids = (int(entry) for entry in os.listdir(host.procfs) if entry.isdecimal())
    return next((pid for pid in pids if _is_daemon(host, pid, name)), None)


def _is_daemon(host: Host, pid: int, name: str) -> bool:
    """Return whether a process is a daemon: by name and owner, as users can pick any name."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        place = host.proc(str(pid))
        named = read(f"{place}/comm").strip() == name[:_NAME]
        return named and os.stat(place).st_uid < _FIRST_USER
    return False
