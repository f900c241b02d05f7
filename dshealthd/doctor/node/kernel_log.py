"""The kernel log of the last hour has no line that says what would end a training."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.linux.kernel_lines import event
from dshealthd.linux.kmsg import KernelLogReader
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

RECENT = 3600.0
"""Seconds: what was longer ago has been dealt with, or shows elsewhere."""
SECONDS = 3.0
MOST = 200_000
"""Records of the largest log that is usual (`log_buf_len=16M`)."""
OF_A_JOB = "Memory cgroup out of memory"
"""A job that ran into the limit of its own cgroup says nothing of the node."""
SERIOUS = {
    "oom_kill": "the kernel killed a process for memory",
    "memory_error_uncorrected": "uncorrected errors of host memory",
    "machine_check": "machine checks",
    "open_files_exhausted": "the system ran out of open files",
    "time_wait_overflow": "more sockets in TIME_WAIT than tcp_max_tw_buckets",
    "conntrack_full": "the firewall's connection table was full, and packets were dropped",
    "hung_task": "tasks hung in the kernel",
    "soft_lockup": "a CPU was locked up",
    "hard_lockup": "a CPU was locked up",
    "kernel_oops": "the kernel crashed in part",
    "io_error": "I/O errors of a disk",
    "nvme_timeout": "an NVMe device did not answer",
    "nvme_failure": "an NVMe device failed",
    "filesystem_error": "errors of a file system",
    "adapter_failure": "a network adapter failed",
    "nvidia_version_mismatch": "the driver's library has another version than its module",
}


def _run(context: NodeContext) -> Iterator[Result]:
    place = context.host.device("kmsg")
    if not os.path.exists(place):
        yield Result(Outcome.OK, f"not on this machine: there is no {place}")
        return
    reader = KernelLogReader(place, time.monotonic)
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    last: dict[str, str] = {}
    counts: Counter[str] = Counter()
    records = 0
    try:
        for record in reader.read(MOST, SECONDS):
            records += 1
            if record.facility or now - record.timestamp > RECENT:
                continue
            name = event(record.message)
            if name in SERIOUS and not record.message.startswith(OF_A_JOB):
                counts[name] += 1
                last[name] = record.message
    except PermissionError:
        yield Result(
            Outcome.UNKNOWN,
            "the kernel log may not be read: it has Xids, killed processes and hung tasks",
            remedy="sudo dshealthd doctor --only kernel-log",
        )
        return
    finally:
        reader.close()
    for name, count in counts.items():
        yield Result(
            Outcome.WARNING,
            f"{SERIOUS[name]}, {plural(count, 'time')} in the last hour: {last[name][:200]}",
            remedy="journalctl -k --since -1h",
            value=str(count),
            component=name.replace("_", " "),
        )
    if not reader.drained:
        yield Result(Outcome.UNKNOWN, f"not read to its end within {SECONDS:g} s")
    if not counts:
        yield Result(
            Outcome.OK, f"nothing serious in the last hour among {plural(records, 'record')}"
        )


CHECK: Check[NodeContext] = Check(
    "host-memory-pressure", "kernel-log", "The kernel log of the last hour", _run
)
