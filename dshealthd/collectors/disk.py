"""Requests of each local disk: how many, how long they took, and how many are under way.

From `/proc/diskstats` and `/sys/block`, which the kernel answers from memory: no disk is touched, so
that one that hangs can be seen and cannot hang its reader.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    NotAvailable,
    Reason,
    SourceError,
    counter,
    gauge,
)
from dshealthd.core.host import read
from dshealthd.core.options import Duration, option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Context, Fault, Sample

REQUESTS = counter(
    "dshealthd_disk_requests_total",
    "Requests that the disk completed since boot, by operation (read, write); /proc/diskstats.",
    "disk",
    "operation",
)
SECONDS = counter(
    "dshealthd_disk_request_seconds_total",
    "Time that all these requests took together, waiting in the kernel's queue included; "
    "/proc/diskstats, where it wraps at 2^32 ms.",
    "disk",
    "operation",
)
BYTES = counter(
    "dshealthd_disk_bytes_total",
    "Bytes read from and written to the disk since boot; /proc/diskstats.",
    "disk",
    "operation",
)
IN_FLIGHT = gauge(
    "dshealthd_disk_requests_in_flight",
    "Requests that the disk has not answered yet; /proc/diskstats.",
    "disk",
)
INFO = gauge(
    "dshealthd_disk_info",
    "1; the model as the disk names itself, and whether it rotates. /sys/block.",
    "disk",
    "disk_model",
    "rotational",
)
LEFT_OUT = gauge(
    "dshealthd_disks_left_out", "Disks that are not shown, as there are more than max_disks."
)

_SECTOR = 512
"""Bytes of a sector of `/proc/diskstats`, whatever the disk's own are."""
_FIELDS = 12
"""Of a line, up to the requests in flight; newer kernels have more."""
_REMOVABLE = ("fd", "sr")
"""Floppies and optical drives: they wait for a medium."""


class DiskStatistics(NamedTuple):
    """One line of `/proc/diskstats`."""

    reads: int
    read_sectors: int
    read_milliseconds: int
    writes: int
    written_sectors: int
    write_milliseconds: int
    in_flight: int


class Identity(NamedTuple):
    """What a disk says of itself."""

    model: str
    rotational: str
    """`1` or `0`; empty where the kernel does not say."""


def parse_diskstats(text: str) -> dict[str, DiskStatistics]:
    """Return the statistics of each block device by its name; partitions are among them.

    ValueError if malformed.
    """
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < _FIELDS:
            message = f"no statistics of a disk: {line[:80]!r}"
            raise ValueError(message)
        numbers = [int(field) for field in fields[3:_FIELDS]]
        found[fields[2]] = DiskStatistics(
            numbers[0], numbers[2], numbers[3], numbers[4], numbers[6], numbers[7], numbers[8]
        )
    return found


@dataclass(frozen=True, kw_only=True)
class DiskOptions(CollectorOptions):
    """How often disks are looked at, and how many."""

    interval: Duration = option("15s", "Time from one sample to the next.", minimum="100ms")
    max_disks: int = option(
        32, "Disks that get series, in the order of their names.", minimum=1, maximum=1000
    )


class Disk(Collector):
    """Reads one file and, of a disk that is new, two more; cannot hang."""

    Options = DiskOptions

    def __init__(self, options: DiskOptions, context: Context) -> None:
        """Look at nothing yet."""
        super().__init__(options, context)
        self._identities: dict[str, Identity | None] = {}

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the requests of each disk.

        Partitions, and what is made of disks (RAID, LVM, loop devices), are left out.
        """
        place = self.host.proc("diskstats")
        try:
            statistics = parse_diskstats(read(place))
        except FileNotFoundError as error:
            raise NotAvailable(str(error)) from error
        except ValueError as error:
            raise SourceError(Reason.MALFORMED, f"{place}: {error}") from error
        # A disk that comes back under a name that another had is read anew.
        self._identities = {
            name: self._identities[name] if name in self._identities else self._identity(name)
            for name in statistics
        }
        disks = sorted(name for name, identity in self._identities.items() if identity is not None)
        shown = disks[: self.options.max_disks]
        yield LEFT_OUT(len(disks) - len(shown))
        for name in shown:
            yield from self._disk(name, statistics[name])

    def _disk(self, name: str, told: DiskStatistics) -> Iterator[Sample]:
        for operation, requests, sectors, milliseconds in (
            ("read", told.reads, told.read_sectors, told.read_milliseconds),
            ("write", told.writes, told.written_sectors, told.write_milliseconds),
        ):
            yield REQUESTS(requests, name, operation)
            yield SECONDS(milliseconds / 1000, name, operation)
            yield BYTES(sectors * _SECTOR, name, operation)
        yield IN_FLIGHT(told.in_flight, name)
        if identity := self._identities[name]:
            yield INFO(1, name, identity.model, identity.rotational)

    def _identity(self, name: str) -> Identity | None:
        """Return what a local disk says of itself; None for what is none."""
        if name.startswith(_REMOVABLE):
            return None
        place = self.host.sys(f"block/{name.replace('/', '!')}")
        if not os.path.isdir(f"{place}/device"):  # a partition, or made of disks
            return None
        return Identity(_text(f"{place}/device/model"), _text(f"{place}/queue/rotational"))


def _text(place: str) -> str:
    """Return one line about a disk from sysfs; empty where the kernel has no such file for it."""
    try:
        return " ".join(read(place, 128).split())
    except FileNotFoundError:
        return ""
