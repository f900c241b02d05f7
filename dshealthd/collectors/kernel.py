"""Uptime, load, threads, and kernel settings that training needs; from `/proc` and `/sys`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, Fault, Metric, Sample, every, gauge
from dshealthd.core.result import read_parsed, read_parts
from dshealthd.linux.process import uptime

if TYPE_CHECKING:
    from dshealthd.core.host import Host

UPTIME = gauge("dshealthd_uptime_seconds", "Time since boot, including suspension; /proc/uptime.")
LOAD = gauge(
    "dshealthd_load_average",
    "Tasks that are running, runnable or in uninterruptible sleep, averaged over 1, 5 and 15 "
    "minutes; /proc/loadavg.",
    "minutes",
)
CPUS = gauge("dshealthd_cpus_online", "Online logical CPUs; /sys/devices/system/cpu/online.")
THREADS = gauge(
    "dshealthd_threads", "Threads of all processes; each uses one process ID. /proc/loadavg."
)
THREADS_LIMIT = gauge(
    "dshealthd_threads_limit",
    "System-wide thread limit: the lesser of kernel.pid_max and kernel.threads-max.",
)
AIO = gauge(
    "dshealthd_aio_requests",
    "Asynchronous I/O requests reserved by processes, for example for NVMe offload; fs.aio-nr.",
)
AIO_LIMIT = gauge(
    "dshealthd_aio_requests_limit", "Limit of reserved asynchronous I/O requests; fs.aio-max-nr."
)
SYSCTL = gauge(
    "dshealthd_sysctl_value",
    "Kernel settings that training or its diagnosis depends on, named as in sysctl(8).",
    "sysctl",
)
SYSCTLS = (
    "kernel.numa_balancing",  # migrates pages of pinned workloads
    "kernel.pid_max",
    "kernel.threads-max",
    "kernel.hung_task_timeout_secs",  # 0: hung tasks are never logged
    "kernel.dmesg_restrict",
    "kernel.yama.ptrace_scope",  # above 1: stacks of hung ranks cannot be captured
    "kernel.tainted",
    "vm.overcommit_memory",
    "vm.zone_reclaim_mode",
    "vm.max_map_count",
    "vm.swappiness",
    "vm.min_free_kbytes",
)
"""Settings that are a single number."""
_THREAD_LIMITS = frozenset({"kernel.pid_max", "kernel.threads-max"})


def parse_loadavg(text: str) -> tuple[list[float], int]:
    """Return averages and threads of `/proc/loadavg`. ValueError if malformed."""
    one, five, fifteen, threads, *_ = text.split()
    return [float(one), float(five), float(fifteen)], int(threads.partition("/")[2])


def parse_cpus(text: str) -> int:
    """Return the number of CPUs in a kernel CPU list such as `0-3,8`. ValueError if malformed."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


class Kernel(Collector):
    """Reads a few files; cannot hang."""

    Options = every("15s")

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the load and the settings that the kernel has; a failed read is a fault."""
        yield from read_parts(
            {
                "uptime": self._uptime,
                "loadavg": self._load,
                "sys/fs/aio-nr": partial(self._sysctl, "fs.aio-nr", AIO),
                "cpu/online": self._cpus,
                **{_path(name): partial(self._sysctl, name, SYSCTL, name) for name in SYSCTLS},
                "threads limit": self._threads_limit,
                "sys/fs/aio-max-nr": partial(self._sysctl, "fs.aio-max-nr", AIO_LIMIT),
            }
        )

    def _uptime(self) -> Iterator[Sample]:
        yield UPTIME(uptime(self.host))

    def _load(self) -> Iterator[Sample]:
        averages, threads = read_parsed(self.host.proc("loadavg"), parse_loadavg)
        for minutes, average in zip(("1", "5", "15"), averages, strict=True):
            yield LOAD(average, minutes)
        yield THREADS(threads)

    def _cpus(self) -> Iterator[Sample]:
        with contextlib.suppress(FileNotFoundError):
            yield CPUS(read_parsed(self.host.sys("devices/system/cpu/online"), parse_cpus))

    def _threads_limit(self) -> Iterator[Sample]:
        limits = [_number(self.host, name) for name in _THREAD_LIMITS]
        known = [limit for limit in limits if limit is not None]
        if known:
            yield THREADS_LIMIT(min(known))

    def _sysctl(self, sysctl: str, metric: Metric, *labels: str) -> Iterator[Sample]:
        if (number := _number(self.host, sysctl)) is not None:
            yield metric(number, *labels)


def _path(sysctl: str) -> str:
    return f"sys/{sysctl.replace('.', '/')}"


def _number(host: Host, sysctl: str) -> int | None:
    """Return a numeric kernel setting; None if this kernel lacks it."""
    try:
        return read_parsed(host.proc(_path(sysctl)), int)
    except FileNotFoundError:
        return None
