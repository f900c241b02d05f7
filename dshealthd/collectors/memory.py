"""Host memory, swap, huge pages and OOM kills, from `/proc/meminfo` and `/proc/vmstat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, Reason, SourceError, counter, gauge
from dshealthd.core.host import read
from dshealthd.core.parts import read_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.core.collector import Fault, Sample

TOTAL = gauge(
    "dshealthd_memory_total_bytes", "Memory that the kernel manages; MemTotal of /proc/meminfo."
)
AVAILABLE = gauge(
    "dshealthd_memory_available_bytes",
    "Memory available without swapping, as the kernel estimates it; MemAvailable.",
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


def parse_meminfo(text: str) -> Mapping[str, int]:
    """Return the fields of `/proc/meminfo`: bytes if they have a unit, else counts.

    ValueError if malformed.
    """
    fields = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        value, *unit = rest.split()
        fields[name] = int(value) * (1024 if unit == ["kB"] else 1)
    return fields


def parse_vmstat(text: str) -> Mapping[str, int]:
    """Return the fields of `/proc/vmstat`: counts since boot."""
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


class HostMemory(Collector):
    """Reads two files; cannot hang."""

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the host's memory and OOM kills, leaving out fields that the kernel lacks."""
        yield from read_parts({"meminfo": self._meminfo, "vmstat": self._vmstat})

    def _meminfo(self) -> Iterator[Sample]:
        fields = self._parsed("meminfo", parse_meminfo)
        for metric, name in _FIELDS.items():
            if name in fields:
                yield metric(fields[name])

    def _vmstat(self) -> Iterator[Sample]:
        vmstat = self._parsed("vmstat", parse_vmstat)
        if "oom_kill" in vmstat:
            yield OOM_KILLS(vmstat["oom_kill"])

    def _parsed(self, file: str, parse: Callable[[str], Mapping[str, int]]) -> Mapping[str, int]:
        """Return the fields of `/proc/meminfo` or `/proc/vmstat`.

        SourceError, which names the file, if it is malformed.
        """
        place = self.host.proc(file)
        try:
            return parse(read(place))
        except ValueError as error:
            raise SourceError(Reason.MALFORMED, f"{place}: {error}") from error
