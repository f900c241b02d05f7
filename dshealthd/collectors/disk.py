"""Requests of each local disk: number, latency, and requests in flight.

From `/proc/diskstats` and `/sys/block`. The kernel answers these from memory without touching a
disk, so a hung disk shows up but cannot hang the collector.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from dshealthd.core.collector import (
    Collector,
    Context,
    Fault,
    NotAvailable,
    Sample,
    counter,
    every,
    gauge,
)
from dshealthd.core.host import lines_of, read_existing
from dshealthd.core.result import read_parsed

REQUESTS = counter(
    "dshealthd_disk_requests_total",
    "Requests completed by the disk since boot: read, write, discard; /proc/diskstats.",
    *("disk", "operation"),
)
SECONDS = counter(
    "dshealthd_disk_request_seconds_total",
    "Total time of completed requests, including kernel queueing; /proc/diskstats, where it "
    "wraps at 2^32 ms.",
    *("disk", "operation"),
)
BYTES = counter(
    "dshealthd_disk_bytes_total",
    "Bytes read from and written to the disk since boot; /proc/diskstats.",
    *("disk", "operation"),
)
IN_FLIGHT = gauge(
    "dshealthd_disk_requests_in_flight",
    "Requests not yet completed by the disk; /proc/diskstats.",
    "disk",
)
INFO = gauge(
    "dshealthd_disk_info",
    "1; the model that the disk reports, and whether it rotates. /sys/block.",
    *("disk", "disk_model", "rotational"),
)

MAX_DISKS = 32
"""Disks that get series, in order of their names."""
_SECTOR = 512
"""Bytes per sector in `/proc/diskstats`, whatever the disk's own sector size."""
_FIELDS = 18
"""Fields of a line up to the milliseconds of discards; newer kernels append more."""
_REMOVABLE = ("fd", "sr")
"""Floppies and optical drives, which wait for a medium."""


class DiskStatistics(NamedTuple):
    """One line of `/proc/diskstats`: requests, sectors and milliseconds by operation."""

    operations: dict[str, tuple[int, int, int]]
    in_flight: int


def parse_diskstats(text: str) -> dict[str, DiskStatistics]:
    """Return the statistics of each block device or partition, by name. ValueError if malformed."""
    found = {}
    for line in lines_of(text):
        fields = line.split()
        if len(fields) < _FIELDS:
            raise ValueError(f"not a line of disk statistics: {line[:80]!r}")
        numbers = [int(field) for field in fields[3:_FIELDS]]
        operations = {
            name: (numbers[at], numbers[at + 2], numbers[at + 3])
            for name, at in (("read", 0), ("write", 4), ("discard", 11))
        }
        found[fields[2]] = DiskStatistics(operations, numbers[8])
    return found


class Disk(Collector):
    """Reads one file, and two more for each new disk; cannot hang."""

    Options = every("15s")

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self._identities: dict[str, tuple[str, str] | None] = {}
        """Model, and `1` if it rotates; None for what is no disk."""

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the requests of each disk, not of partitions, RAID, LVM or loop devices."""
        try:
            statistics = read_parsed(self.host.proc("diskstats"), parse_diskstats)
        except FileNotFoundError as error:
            raise NotAvailable(str(error)) from error
        # Absent disks are forgotten, so a new disk under an old name is identified again.
        self._identities = {
            name: self._identities[name] if name in self._identities else self._identity(name)
            for name in statistics
        }
        disks = sorted(name for name, identity in self._identities.items() if identity is not None)
        for name in disks[:MAX_DISKS]:
            yield from self._disk(name, statistics[name])

    def _disk(self, name: str, told: DiskStatistics) -> Iterator[Sample]:
        for operation, (requests, sectors, milliseconds) in told.operations.items():
            yield REQUESTS(requests, name, operation)
            yield SECONDS(milliseconds / 1000, name, operation)
            if operation != "discard":  # which moves none
                yield BYTES(sectors * _SECTOR, name, operation)
        yield IN_FLIGHT(told.in_flight, name)
        if identity := self._identities[name]:
            yield INFO(1, name, *identity)

    def _identity(self, name: str) -> tuple[str, str] | None:
        if name.startswith(_REMOVABLE):
            return None
        place = self.host.sys(f"block/{name.replace('/', '!')}")
        if not os.path.isdir(f"{place}/device"):  # a partition, or built on disks
            return None
        return _text(f"{place}/device/model"), _text(f"{place}/queue/rotational")


def _text(place: str) -> str:
    """Return a one-line sysfs attribute of a disk; empty if the kernel has no such file."""
    return " ".join((read_existing(place) or "").split())
