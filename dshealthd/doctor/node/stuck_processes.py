"""No process hangs in the kernel with a GPU open.

Only `comm`, `stat` and the links in `fd` are read: the command line and the maps of a process in
uninterruptible sleep can block their reader.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.host import Host
    from dshealthd.doctor.node_context import NodeContext

LOOKS = 3
PAUSE = 0.4
"""Seconds between two looks: a process that only waits for a disk is in D for milliseconds."""


def _uninterruptible(host: Host) -> dict[str, str]:
    """Return the processes in state D, by pid, with their names."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir(host.procfs)):
        with contextlib.suppress(OSError):  # it ended meanwhile
            head, _, tail = read(host.proc(f"{pid}/stat")).rpartition(")")
            if tail.split(maxsplit=1)[:1] == ["D"]:
                found[pid] = head.partition("(")[2]
    return found


def _devices(host: Host, pid: str) -> set[str]:
    """Return the NVIDIA devices that a process has open. PermissionError."""
    base = host.proc(f"{pid}/fd")
    found = set()
    for descriptor in os.listdir(base):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(f"{base}/{descriptor}")
            if target.startswith(("/dev/nvidia", host.device("nvidia"))):
                found.add(target)
    return found


def _run(context: NodeContext) -> Iterator[Result]:
    host = context.host
    stuck = _uninterruptible(host)
    for _ in range(LOOKS - 1):
        if not stuck:
            break
        time.sleep(PAUSE)
        now = _uninterruptible(host)
        stuck = {pid: name for pid, name in stuck.items() if pid in now}
    hidden, found = [], 0
    for pid, name in stuck.items():
        try:
            devices = _devices(host, pid)
        except FileNotFoundError:
            continue  # it ended
        except PermissionError:
            hidden.append(f"{pid} ({name})")
            continue
        if devices:
            found += 1
            yield Result(
                Outcome.CRITICAL,
                f"process {pid} ({name}) hangs in the kernel and has {', '.join(sorted(devices))} "
                "open: it cannot be killed, and its GPU is not free",
                remedy="dmesg | grep -i -e xid -e 'blocked for more than'; sudo reboot",
                component=f"pid {pid}",
            )
    if hidden:
        yield Result(
            Outcome.UNKNOWN,
            f"processes {', '.join(hidden)} hang in the kernel, and their files are not yours to "
            "see",
            remedy="sudo dshealthd doctor --only stuck-processes",
        )
    if not found and not hidden:
        yield Result(
            Outcome.OK,
            f"{plural(len(stuck), 'process hangs', 'processes hang')} in the kernel, "
            "none with a GPU open",
        )


CHECK: Check[NodeContext] = Check(
    "nvml-broken", "stuck-processes", "No process hangs in the kernel with a GPU open", _run
)
