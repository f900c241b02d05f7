"""Clocks of logs: what timestamps in different formats mean.

Stamps without a time zone count as UTC.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from dshealthd.explain.events import Origin, Stamp

Clock: TypeAlias = "str | int"
"""A host name, or the number of a file whose host is unknown."""
UNCERTAINTY = 5.0
"""Seconds by which the clocks of two hosts may differ, as seen in clusters without NTP."""


def seconds(stamp: Stamp, year: int) -> float | None:
    """Return a stamp in seconds; None if it is not a date and time, such as the kernel's uptime."""
    text = stamp.text
    try:
        if stamp.form == "iso":
            when = datetime.fromisoformat(text.replace("/", "-"))
        elif stamp.form == "glog":
            day, _, time = text.partition(" ")
            day = day.zfill(4)  # torch pads no month
            when = datetime.fromisoformat(f"{year:04}-{day[:2]}-{day[2:]} {time}")
        elif stamp.form == "syslog":
            when = datetime.strptime(f"{year} {text} +0000", "%Y %b %d %H:%M:%S %z")
        elif stamp.form == "ctime":
            when = datetime.strptime(f"{text} +0000", "%a %b %d %H:%M:%S %Y %z")
        else:
            return None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, ArithmeticError):
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
