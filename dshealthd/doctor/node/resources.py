"""What the host gives to jobs: memory, files, paths, time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.memory import parse_meminfo
from dshealthd.core.host import read
from dshealthd.doctor.check import Result, warning
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.findings import storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

SWAP_USED = 0.5
"""Share of swap in use above which it is a warning: idle pages alone rarely fill half of it."""
_GIB = 1 << 30


def _clock(context: NodeContext) -> str:
    offset = context.series.value("clock_offset_seconds")
    if context.series.value("clock_synchronized") == 0:
        return "not synchronized at present"
    return "synchronized" if offset is None else f"synchronized, off by {offset:.3g} s"


CLOCK = snapshot_check(
    "clock-unsynchronized", "clock", "The clock is synchronized", ("clock",), _clock
)


def _disk_space(context: NodeContext) -> str:
    paths = sorted(point.labels["path"] for point in context.series("filesystem_size_bytes"))
    return f"enough free space at {', '.join(paths)}"


DISK_SPACE = snapshot_check(
    "disk-full", "disk-space", "File systems have free space", ("filesystem",), _disk_space
)


def _host_memory_problems(context: NodeContext) -> Iterator[Result]:
    fields = parse_meminfo(read(context.host.proc("meminfo")))
    if missing := [name for name in ("SwapTotal", "SwapFree") if name not in fields]:
        message = f"no {' and '.join(missing)} in meminfo"
        raise ValueError(message)
    total, free = fields["SwapTotal"], fields["SwapFree"]
    if total and (total - free) / total > SWAP_USED:
        yield warning(
            f"{(total - free) / _GIB:.1f} of {total / _GIB:.1f} GiB of swap are in use: offloaded "
            "optimizer states and data loaders become very slow once they are swapped out",
            # `swapoff` would have the OOM killer end jobs where the pages do not fit into memory
            remedy="grep -H VmSwap /proc/[0-9]*/status | sort -k2 -nr | head  # who is swapped out",
            value=f"{(total - free) / total:.0%}",
            limit=f"{SWAP_USED:.0%}",
            source="dshealthd's own: idle pages alone rarely fill half of the swap",
            component="swap",
        )


def _host_memory(context: NodeContext) -> str:
    available = context.series.value("memory_available_bytes") or 0.0
    total = context.series.value("memory_total_bytes") or 0.0
    return f"{available / _GIB:.0f} of {total / _GIB:.0f} GiB of memory available"


HOST_MEMORY = snapshot_check(
    "host-memory-pressure",
    "host-memory",
    "The host has free memory",
    ("memory", "pressure"),
    _host_memory,
    _host_memory_problems,
)


def _loopback(context: NodeContext) -> str:
    seconds = context.series.value("loopback_connect_seconds")
    if seconds is None:
        return "the last TCP connection to 127.0.0.1 failed"
    return f"a TCP connection to 127.0.0.1 takes {seconds * 1e3:.2g} ms"


LOOPBACK = snapshot_check(
    "loopback-refused", "loopback", "TCP works on the loopback interface", ("loopback",), _loopback
)


def _open_files(context: NodeContext) -> str:
    used = context.series.value("open_files", scope="system") or 0
    limit = context.series.value("open_files_limit", scope="system") or 0
    requests = context.series.value("aio_requests") or 0
    return (
        f"{used:g} of {limit:g} files open system-wide, {requests:g} asynchronous I/O requests in "
        "use; no limit is near"
    )


OPEN_FILES = snapshot_check(
    "open-files",
    "open-files",
    "Open files, threads, requests and sockets are below their limits",
    ("open_files", "kernel", "tcp", "tcp_limits"),
    _open_files,
)


def _paths(context: NodeContext) -> str:
    written = sorted(point.labels["path"] for point in context.series("path_writable"))
    paths = sorted(point.labels["path"] for point in context.series("filesystem_size_bytes"))
    tested = f"a write test passed at {', '.join(written)}" if written else "none has a write test"
    return f"{', '.join(paths)} respond; {tested}"


PATHS = snapshot_check(
    "checkpoint-path", "paths", "Configured paths respond and are writable", ("filesystem",), _paths
)


def _shared_memory(context: NodeContext) -> str:
    size = context.series.value("filesystem_size_bytes", path=storage.SHARED_MEMORY)
    free = context.series.value("filesystem_free_bytes", path=storage.SHARED_MEMORY) or 0.0
    if size is None:
        return f"{storage.SHARED_MEMORY} is not among collectors.filesystem.paths"
    return f"{storage.SHARED_MEMORY} has {free / 1e9:.1f} of {size / 1e9:.1f} GB free"


SHARED_MEMORY = snapshot_check(
    "shared-memory",
    "shared-memory",
    "Shared memory is large enough",
    ("filesystem",),
    _shared_memory,
)
