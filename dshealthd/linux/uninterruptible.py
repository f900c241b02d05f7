"""Processes in uninterruptible sleep, waiting for a device or a file system.

Only `stat` and the links in `fd` are read: the command line and the maps of such a process can
block their reader.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.host import read_bytes
from dshealthd.linux.process_stat import parse_stat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.host import Host

_KERNEL_THREAD = 0x0020_0000
"""PF_KTHREAD of linux/sched.h: kernel threads sleep this way whenever they are idle."""
_CHILDREN_LIMIT = 1 << 20
"""Bytes read of the list of kernel threads: some 150,000."""


class Sleep(NamedTuple):
    """One uninterruptible sleep of a process, as far as two samples can identify it."""

    pid: int
    start: int
    """Clock ticks from boot to the start of the process."""
    cpu_ticks: int
    """Its CPU time so far: if this grows, it has been awake in between."""


def sleeping(host: Host, kernel_threads: set[str] | None = None) -> dict[Sleep, str] | None:
    """Return the processes in uninterruptible sleep, excluding kernel threads, with their names.

    `kernel_threads` are the pids of those found by earlier calls, which updates it: a large node
    has thousands, and they are not read again. None if `/proc` does not show other users'
    processes (hidepid). OSError.
    """
    pids = [entry for entry in os.listdir(host.procfs) if entry.isdecimal()]
    if "1" not in pids:
        return None
    found = {}
    if kernel_threads is None:
        kernel_threads = set()
    kernel_threads &= _children_of_kthreadd(host)
    for pid in pids:
        if pid in kernel_threads:
            continue
        try:
            data = read_bytes(host.proc(f"{pid}/stat"), 4096)
            stat = parse_stat(data)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except PermissionError:
            return None
        if stat.flags & _KERNEL_THREAD:
            kernel_threads.add(pid)
        elif stat.state == "D":
            name = data[data.find(b"(") + 1 : data.rfind(b")")].decode(errors="replace")
            found[Sleep(int(pid), stat.start, stat.cpu_ticks)] = name
    return found


def open_files(host: Host, pid: int) -> Iterator[str]:
    """Yield the target of each open descriptor of a process; only links are read.

    PermissionError; FileNotFoundError or ProcessLookupError if it has ended.
    """
    for number in os.listdir(host.proc(f"{pid}/fd")):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            yield os.readlink(host.proc(f"{pid}/fd/{number}"))


def is_gpu_device(host: Host, path: str) -> bool:
    """Return whether a path is that of a device of the NVIDIA driver."""
    return path.startswith(("/dev/nvidia", host.device("nvidia")))


def _children_of_kthreadd(host: Host) -> frozenset[str]:
    """Return the pids of the children of pid 2, which starts all kernel threads.

    Its children are also programs that the kernel runs, such as modprobe or a handler of core
    dumps. Empty if the kernel does not list them; some may be missing.
    """
    try:
        children = read_bytes(host.proc("2/task/2/children"), _CHILDREN_LIMIT)
    except OSError:
        return frozenset()
    if len(children) >= _CHILDREN_LIMIT:  # the last pid may be cut off
        return frozenset()
    return frozenset(children.decode(errors="replace").split())
