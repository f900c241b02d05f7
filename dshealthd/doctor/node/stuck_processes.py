"""No process is hung in the kernel with a GPU open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.linux.process import is_gpu_device, open_files, sleeping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

LOOKS = 3
PAUSE = 0.4
"""Seconds between two looks: a process that waits for a disk is in D state for milliseconds."""


def _run(context: NodeContext) -> Iterator[Result]:
    host = context.host
    stuck = sleeping(host)
    for _ in range(LOOKS - 1):
        if not stuck:
            break
        time.sleep(PAUSE)
        now = sleeping(host)
        stuck = {sleep: name for sleep, name in stuck.items() if sleep in (now or ())}
    if stuck is None:
        yield Result(
            Outcome.UNKNOWN,
            "/proc does not show the processes of others (hidepid)",
            remedy="sudo dshealthd doctor --only stuck-processes",
        )
        return
    unread, found = set(), 0
    for sleep, name in stuck.items():
        pid = sleep.pid
        try:
            devices = {file for file in open_files(host, pid) if is_gpu_device(host, file)}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        except PermissionError:
            unread.add(sleep)
            continue
        if devices:
            found += 1
            yield Result(
                Outcome.CRITICAL,
                f"process {pid} ({name}) is hung in the kernel with {', '.join(sorted(devices))} "
                "open: it cannot be killed, and its GPU stays in use",
                remedy="dmesg | grep -i -e xid -e 'blocked for more than'"
                "  # then drain the node and reboot it",
                component=f"pid {pid}",
            )
    # The kernel also refuses for a process that is ending, even to root.
    still = sleeping(host) if unread else {}
    hidden = [
        f"{sleep.pid} ({stuck[sleep]})" for sleep in unread if still is None or sleep in still
    ]
    if hidden:
        yield Result(
            Outcome.UNKNOWN,
            f"processes {', '.join(hidden)} are hung in the kernel; you have no permission to see "
            "their open files",
            remedy="sudo dshealthd doctor --only stuck-processes",
        )
    if not found and not hidden:
        yield Result(
            Outcome.OK,
            f"{plural(len(stuck), 'process is', 'processes are')} hung in the kernel, "
            "none with a GPU open",
        )


CHECK: Check[NodeContext] = Check(
    "nvml-broken", "stuck-processes", "No process is hung in the kernel with a GPU open", _run
)
