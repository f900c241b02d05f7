"""What the kernel says: its log of the last hour, and processes hung in it with a GPU open."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Result, critical, ok, unknown, warning
from dshealthd.linux.kernel_lines import EventParser
from dshealthd.linux.kmsg import KernelLogReader
from dshealthd.linux.process import is_gpu_device, open_files, sleeping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

RECENT = 3600.0
"""Seconds: an older problem has been handled, or shows elsewhere."""
SECONDS = 3.0
MOST = 200_000
"""Records in the largest usual log (`log_buf_len=16M`)."""
OF_A_JOB = "Memory cgroup out of memory"
"""A job that reaches its own cgroup's limit says nothing about the node."""
SERIOUS = {
    "oom_kill": "the kernel's OOM killer killed a process",
    "memory_error_uncorrected": "uncorrected host memory errors",
    "machine_check": "uncorrected machine checks",
    "open_files_exhausted": "the system ran out of open files",
    "time_wait_overflow": "more sockets in TIME_WAIT than tcp_max_tw_buckets",
    "conntrack_full": "the firewall's connection table was full, and packets were dropped",
    "hung_task": "tasks hung in the kernel",
    "soft_lockup": "a CPU was locked up",
    "hard_lockup": "a CPU was locked up",
    "kernel_oops": "a kernel oops",
    "io_error": "disk I/O errors",
    "nvme_timeout": "an NVMe device timed out",
    "nvme_failure": "an NVMe device failed",
    "filesystem_error": "file system errors",
    "adapter_failure": "a network adapter failed",
    "nvidia_version_mismatch": "the NVIDIA driver's library and kernel module differ in version",
}
LOOKS = 3
"""Looks at a process in D state: what is in it at all three, within 0.8 s, waits for one thing."""
PAUSE = 0.4
"""Seconds between two looks: a process that waits for a disk is in D state for milliseconds."""


def _run(context: NodeContext) -> Iterator[Result]:
    device = context.host.device("kmsg")
    if not os.path.exists(device):
        yield ok(f"not applicable: there is no {device}")
        return
    reader = KernelLogReader(device, time.monotonic)
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    last: dict[str, str] = {}
    counts: Counter[str] = Counter()
    records = 0
    parser = EventParser()
    try:
        for record in reader.read(MOST, SECONDS):
            records += 1
            if record.facility or now - record.timestamp > RECENT:
                continue
            event = parser.event(record.message)
            if event is None or event.name not in SERIOUS:
                continue
            if not record.message.startswith(OF_A_JOB):
                counts[event.name] += 1
                last[event.name] = record.message
    except PermissionError:
        yield unknown(
            "no permission to read the kernel log, which reports Xids, OOM kills and hung tasks",
            remedy="sudo dshealthd doctor --only kernel-log",
        )
        return
    finally:
        reader.close()
    for name, count in counts.items():
        yield warning(
            f"{SERIOUS[name]}, {plural(count, 'time')} in the last hour: {last[name][:200]}",
            remedy="journalctl -k --since -1h",
            value=str(count),
            component=name.replace("_", " "),
        )
    if not reader.drained:
        yield unknown(f"the log was not read to its end within {SECONDS:g} s")
    if not counts:
        yield ok(f"nothing serious in the last hour among {plural(records, 'record')}")


KERNEL_LOG: Check[NodeContext] = Check(
    "host-memory-pressure", "kernel-log", "The kernel log of the last hour", _run
)


def _stuck(context: NodeContext) -> Iterator[Result]:
    host = context.host
    stuck = sleeping(host)
    for _ in range(LOOKS - 1):
        if not stuck:
            break
        time.sleep(PAUSE)
        now = sleeping(host)
        stuck = {sleep: name for sleep, name in stuck.items() if sleep in (now or ())}
    if stuck is None:
        yield unknown(
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
            yield critical(
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
        yield unknown(
            f"processes {', '.join(hidden)} are hung in the kernel; you have no permission to see "
            "their open files",
            remedy="sudo dshealthd doctor --only stuck-processes",
        )
    if not found and not hidden:
        yield ok(
            f"{plural(len(stuck), 'process is', 'processes are')} hung in the kernel, "
            "none with a GPU open"
        )


STUCK_PROCESSES: Check[NodeContext] = Check(
    "nvml-broken", "stuck-processes", "No process is hung in the kernel with a GPU open", _stuck
)
