"""Clock synchronization, from adjtimex(2).

With ntpd or systemd-timesyncd, the offset is what the kernel still has to correct. chrony steers
the frequency itself, so its offset stays near 0: use the maximum error instead.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dshealthd.core.collector import Collector, Context, Fault, Sample, gauge

SYNCHRONIZED = gauge(
    "dshealthd_clock_synchronized",
    "1 if a time daemon keeps the clock synchronized, 0 if not: the kernel's maximum error has "
    "reached 16 s.",
)
OFFSET = gauge(
    "dshealthd_clock_offset_seconds",
    "Offset not yet corrected by the kernel; absent while not synchronized.",
)
MAXIMUM_ERROR = gauge(
    "dshealthd_clock_maximum_error_seconds",
    "Upper bound of the clock's error, which grows between updates; absent while not synchronized.",
)

_STA_NANO = 0x2000
_UNKNOWN = 16_000_000
"""Microseconds at which the kernel's maximum error stops, where it is from boot and after a step
until a daemon sets it, and 9 hours after a daemon's last update; NTP_PHASE_LIMIT of linux/timex.h.

STA_UNSYNC says less: chronyd without `rtcsync` never clears it, as it is also what keeps the kernel
from setting the hardware clock. systemd's timedatectl goes by the error, too.
"""
_libc = ctypes.CDLL(None, use_errno=True)


class Timex(NamedTuple):
    """Result of adjtimex(2), with times in its own units."""

    status: int
    offset: int
    """Microseconds, or nanoseconds if the status has STA_NANO."""
    maximum_error: int
    """Microseconds."""


class _Structure(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),  # larger than the rest of the kernel's struct
    )


def adjtimex() -> Timex:
    """Read the kernel's clock state; with no mode set this changes nothing and needs no privilege.

    OSError where a seccomp filter refuses the call.
    """
    structure = _Structure(modes=0)
    if _libc.adjtimex(ctypes.byref(structure)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"adjtimex: {os.strerror(number)}")
    return Timex(structure.status, structure.offset, structure.maxerror)


class Clock(Collector):
    """Makes one system call; cannot hang."""

    def __init__(
        self, options: Any, context: Context, source: Callable[[], Timex] = adjtimex
    ) -> None:
        super().__init__(options, context)
        self._source = source

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the clock's state; offset and error only while synchronized."""
        timex = self._source()
        synchronized = timex.maximum_error < _UNKNOWN
        yield SYNCHRONIZED(float(synchronized))
        if synchronized:
            yield OFFSET(timex.offset / (1e9 if timex.status & _STA_NANO else 1e6))
            yield MAXIMUM_ERROR(timex.maximum_error / 1e6)
