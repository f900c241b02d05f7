"""Host memory, swap, huge pages and OOM kills, from `/proc/meminfo` and `/proc/vmstat`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from dshealthd.core.collector import Collector, Fault, Sample, counter, gauge
from dshealthd.core.result import read_parsed, read_parts

TOTAL = gauge(
    "dshealthd_memory_total_bytes", "Memory that the kernel manages; MemTotal of /proc/meminfo."
)
AVAILABLE = gauge(
    "dshealthd_memory_available_bytes",
    "Memory available without swapping, as the kernel estimates it (MemAvailable), plus what the "
    "cache of ZFS holds above its minimum.",
)
SHARED = gauge(
    "dshealthd_memory_shared_bytes",
    "Memory in tmpfs, including /dev/shm, and shared segments; Shmem.",
)
LOCKED = gauge(
    "dshealthd_memory_locked_bytes",
    "Memory locked with mlock(2), without memory pinned by drivers; Mlocked.",
)
SWAP_TOTAL = gauge("dshealthd_swap_total_bytes", "Swap space; SwapTotal.")
SWAP_FREE = gauge("dshealthd_swap_free_bytes", "Unused swap space; SwapFree.")
HUGE_TOTAL = gauge(
    "dshealthd_huge_pages", "Reserved huge pages of the default size; HugePages_Total."
)
HUGE_FREE = gauge(
    "dshealthd_huge_pages_free", "Unused huge pages of the default size; HugePages_Free."
)
OOM_KILLS = counter(
    "dshealthd_oom_kills_total",
    "Processes killed by the OOM killer since boot, including for cgroup limits; oom_kill of "
    "/proc/vmstat.",
)

_FIELDS = {
    TOTAL: "MemTotal",
    AVAILABLE: "MemAvailable",
    SHARED: "Shmem",
    LOCKED: "Mlocked",
    SWAP_TOTAL: "SwapTotal",
    SWAP_FREE: "SwapFree",
    HUGE_TOTAL: "HugePages_Total",
    HUGE_FREE: "HugePages_Free",
}
# The two files have 250 lines; parsing them all takes several times as long.
_MEMINFO = re.compile(rf"^({'|'.join(_FIELDS.values())}):(.*)", re.MULTILINE)
_OOM_KILLS = re.compile(r"^oom_kill\b(.*)", re.MULTILINE)
_ARC = re.compile(r"^(size|c_min) +\d+ +(.*)", re.MULTILINE)


def parse_meminfo(text: str) -> Mapping[str, int]:
    """Return the exported fields of `/proc/meminfo`, in bytes if they have a unit. ValueError."""
    fields = {}
    for name, rest in _MEMINFO.findall(text):
        value, *unit = rest.split()
        fields[name] = int(value) * (1024 if unit == ["kB"] else 1)
    if not fields:
        raise ValueError("none of the usual fields")
    return fields


def parse_oom_kills(text: str) -> int | None:
    """Return the kills since boot of `/proc/vmstat`, None if it has none. ValueError."""
    found = _OOM_KILLS.search(text)
    return None if found is None else int(found[1])


def parse_arcstats(text: str) -> int:
    """Return the bytes that the cache of ZFS gives back when memory is short. ValueError."""
    sizes = {name: int(size) for name, size in _ARC.findall(text)}
    return max(0, sizes["size"] - sizes["c_min"]) if len(sizes) > 1 else 0


class HostMemory(Collector):
    """Reads two files, with ZFS three; cannot hang."""

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the host's memory and OOM kills, leaving out fields that the kernel lacks."""
        yield from read_parts({"meminfo": self._meminfo, "vmstat": self._vmstat})

    def _meminfo(self) -> Iterator[Sample]:
        fields = dict(read_parsed(self.host.proc("meminfo"), parse_meminfo))
        # MemAvailable leaves it out (openzfs/zfs#10255), though it may fill half of the memory or
        # more: a node that reads its data from ZFS would look as if it ran out of memory.
        with contextlib.suppress(FileNotFoundError):
            cache = read_parsed(self.host.proc("spl/kstat/zfs/arcstats"), parse_arcstats)
            if "MemAvailable" in fields:
                fields["MemAvailable"] += cache
        for metric, name in _FIELDS.items():
            if name in fields:
                yield metric(fields[name])

    def _vmstat(self) -> Iterator[Sample]:
        if (kills := read_parsed(self.host.proc("vmstat"), parse_oom_kills)) is not None:
            yield OOM_KILLS(kills)
