"""Clocks of logs: what timestamps in different formats mean.

Stamps without a time zone count as UTC.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.explain.events import Origin, Stamp

Clock: TypeAlias = "str | int"
"""A host name, or the number of a file whose host is unknown."""
UNCERTAINTY = 5.0
"""Seconds by which the clocks of two hosts may differ, as seen in clusters without NTP."""
_ISO = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_-](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?(Z|[+-]\d\d:?\d\d)?"
)
_GLOG = re.compile(r"(\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?")


def seconds(stamp: Stamp, year: int) -> float | None:
    """Return a stamp in seconds; None if it is not a date and time, such as the kernel's uptime."""
    try:
        if stamp.form == "iso" and (match := _ISO.match(stamp.text)):
            zone = UTC
            if match[8] and match[8] != "Z":
                hours, minutes = int(match[8][1:3]), int(match[8][-2:])
                offset = timedelta(hours=hours, minutes=minutes)
                zone = timezone(offset if match[8][0] == "+" else -offset)
            year, *rest = (int(match[part]) for part in range(1, 7))
            when = datetime(year, *rest, tzinfo=zone)  # type: ignore[arg-type,misc]
            return when.timestamp() + float(f"0.{match[7] or 0}")
        if stamp.form == "glog" and (match := _GLOG.match(stamp.text)):
            rest = [int(match[part]) for part in range(1, 6)]
            when = datetime(year, *rest, tzinfo=UTC)  # type: ignore[arg-type,misc]
            return when.timestamp() + float(f"0.{match[6] or 0}")
        if stamp.form == "syslog":
            when = datetime.strptime(f"{year} {stamp.text} +0000", "%Y %b %d %H:%M:%S %z")
            return when.timestamp()
        if stamp.form == "ctime":
            when = datetime.strptime(f"{stamp.text} +0000", "%a %b %d %H:%M:%S %Y %z")
            return when.timestamp()
    except (ValueError, ArithmeticError):
        return None
    return None


def year_of(stamps: Iterable[Stamp], default: int) -> int:
    """Return the year of the first stamp that has one, else `default`."""
    for stamp in stamps:
        if stamp.form == "iso":
            return int(stamp.text[:4])
    return default


def clock_of(origin: Origin) -> Clock:
    """Return the clock that stamps a line."""
    return origin.source if origin.host is None else origin.host
