"""Self-metrics: the agent's metrics about itself, besides its collectors' and workers' health."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Iterator

from dshealthd import __version__
from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.host import read

BUILD = gauge(
    "dshealthd_build_info", "1; the labels give the running version.", "version", "pythonversion"
)
RELOAD_OK = gauge(
    "dshealthd_config_last_reload_successful",
    (
        "1 if the last load of the configuration succeeded; 0 while the previous configuration is "
        "kept."
    ),
)
CPU = counter(
    "process_cpu_seconds_total",
    "User and system CPU time of the agent itself, without its workers.",
)
RESIDENT = gauge(
    "process_resident_memory_bytes", "Resident memory of the agent itself, without its workers."
)
FILES = gauge("process_open_fds", "Open file descriptors of the agent itself.")
FILES_LIMIT = gauge("process_max_fds", "Soft limit of open file descriptors of the agent itself.")
START = gauge("process_start_time_seconds", "Unix time at which the agent started.")

_PAGE = resource.getpagesize()


def open_files() -> int:
    """Return the number of open descriptors of this process. Raise OSError if it is unreadable."""
    # Linux 6.2 and later give it as the size of the directory, which needs no descriptor: the
    # number matters most when none is left.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1


class SelfMetrics:
    """The agent's own counters and its process, as of the moment of a scrape."""

    def __init__(self, started: float) -> None:
        """Start with a configuration loaded at `started`, Unix time in seconds."""
        self.started = started
        self.reload_ok = True
        """Whether the last load of the configuration succeeded."""

    def samples(self) -> Iterator[Sample]:
        """Yield the agent's own metrics, from the real `/proc` whatever `--path.procfs` says."""
        times = os.times()
        yield BUILD(1.0, __version__, platform.python_version())
        yield RELOAD_OK(float(self.reload_ok))
        yield CPU(times.user + times.system)
        with contextlib.suppress(OSError):  # no descriptor left to read it: absent, not wrong
            yield RESIDENT(int(read("/proc/self/statm").split()[1]) * _PAGE)
        with contextlib.suppress(OSError):
            yield FILES(open_files())
        yield FILES_LIMIT(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        yield START(self.started)
