r"""`/dev/kmsg`: the kernel log, one numbered record per read, with the facility that wrote it.

A record is `priority,sequence,microseconds,flags[,…];message\n KEY=value\n…`; the kernel escapes
unprintable bytes. See Documentation/ABI/testing/dev-kmsg of the kernel. A process that writes to
`/dev/kmsg` can choose any facility but 0, the kernel's own.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dshealthd.core.collector import SourceError
from dshealthd.core.result import os_reason

KERNEL = 0
"""Facility of the kernel itself."""
BUFFER = 1 << 14
"""Larger than the kernel's largest record (8 KiB); a read into a smaller buffer fails."""
CLOCK_EVERY = 64
"""Records between checks of the clock."""
RETRY_FIRST = 1.0
RETRY_LIMIT = 60.0
"""Seconds before a failed log is reopened, doubled from first to limit."""
_FIELDS = 4
_END = 1 << 64
"""The kernel counts records and microseconds in 64 bits."""


class KernelLogRecord(NamedTuple):
    """One record of the log."""

    facility: int
    sequence: int
    timestamp: float
    """Seconds since boot."""
    whole: bool
    """False for a fragment of a continued line, which may not start where the line started."""
    message: str


def parse(raw: bytes) -> KernelLogRecord:
    """Return the record in one read of `/dev/kmsg`; ValueError if it is malformed.

    The dictionary after the message is ignored.
    """
    head, semicolon, body = raw.partition(b";")
    fields = head.split(b",")
    if not semicolon or len(fields) < _FIELDS:
        raise ValueError(f"not a kernel log record: {raw[:60]!r}")
    priority, sequence, microseconds = (int(field) for field in fields[:3])
    if not 0 <= min(priority, sequence, microseconds) <= max(sequence, microseconds) < _END:
        raise ValueError(f"not the numbers of a kernel log record: {raw[:60]!r}")
    text = body.partition(b"\n")[0].decode("ascii", "replace")
    return KernelLogRecord(priority >> 3, sequence, microseconds / 1e6, fields[3] == b"-", text)


def kernel_clock() -> float:
    """Return the seconds since boot as in the timestamps of records, or nearly.

    Both count the same ticks. CLOCK_MONOTONIC is also adjusted by NTP, and after months of uptime
    differs by minutes.
    """
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


class LogReader:
    """A log of numbered records, from which each is read once."""

    descriptor: int | None = None
    """Readable while there are new records; None if there is none open."""

    def __init__(self, monotonic: Callable[[], float], position: int) -> None:
        self.position = position
        """Least number of the next record."""
        self.lost = 0
        """Records that were never read, where gaps in the numbers tell."""
        self.drained = False
        """Whether the end of the log has been reached since it was opened."""
        self._monotonic = monotonic
        self._newest = -1

    def behind(self) -> bool:
        """Return whether all was read and ends before the position, which is of another log."""
        return self.drained and 0 <= self._newest < self.position - 1


class KernelLogReader(LogReader):
    """Reads a kernel log continuously, every record once, and counts those it has missed."""

    def __init__(
        self,
        place: str,
        monotonic: Callable[[], float],
        position: int = 0,
        read: Callable[[int, int], bytes] = os.read,
    ) -> None:
        """Prepare to read from record `position` on, by a function like read(2)."""
        super().__init__(monotonic, position)
        self.place = place
        self._read = read
        self._failures = 0
        self._retry = 0.0
        self._trouble: OSError | None = None

    def read(self, most: int, seconds: float) -> Iterator[KernelLogRecord]:
        """Yield new records of `/dev/kmsg`, at most `most` within `seconds`; the rest comes next
        time.

        OSError if the log cannot be opened or read. It is reopened after a back-off; until then,
        `SourceError`.
        """
        if self.descriptor is None:
            self.descriptor = self._open()
        until = self._monotonic() + seconds
        for count in range(1, most + 1):
            try:
                raw = self._read(self.descriptor, BUFFER)
            except BlockingIOError:
                self._failures = 0
                self.drained = True
                return
            except BrokenPipeError:
                continue  # overwritten before it was read: the gap to the next number is counted
            except OSError as error:
                self._fail(error)
                raise
            if not raw:
                ended = OSError(errno.EIO, "closed by the other end", self.place)
                self._fail(ended)
                raise ended
            try:
                record = parse(raw)
            except (ValueError, ArithmeticError):
                continue  # its number is a gap
            # Includes records that were read before: `behind` compares the whole log with the
            # position.
            self._newest = max(self._newest, record.sequence)
            if record.sequence >= self.position:
                self.lost += record.sequence - self.position
                self.position = record.sequence + 1
                yield record
            if not count % CLOCK_EVERY and self._monotonic() >= until:
                return

    def close(self) -> None:
        """Close `/dev/kmsg`."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _open(self) -> int:
        now = self._monotonic()
        if self._trouble is not None and now < self._retry:
            detail = f"{self._trouble}; retry in {self._retry - now:.0f} s"
            raise SourceError(os_reason(self._trouble), detail) from self._trouble
        try:
            descriptor = os.open(self.place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._fail(error)
            raise
        self._newest = -1
        self.drained = False
        return descriptor

    def _fail(self, error: OSError) -> None:
        self.close()
        self._failures += 1
        self._trouble = error
        self._retry = self._monotonic() + min(
            RETRY_LIMIT, RETRY_FIRST * 2.0 ** min(self._failures - 1, 16)
        )
