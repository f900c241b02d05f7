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
_HALF_A_YEAR = 182 * 86_400.0
"""Seconds: where no line has a year, logs are of the year that ends now, of which this is the
middle, as a failure that is asked about has happened.
"""


def seconds(stamp: Stamp, near: float) -> float | None:
    """Return a stamp in seconds; None if it is not a date and time, such as the kernel's uptime.

    One without a year is of the year in which it is nearest to the moment `near`.
    """
    if stamp.form not in {"glog", "syslog"}:
        return _seconds(stamp, 0)
    year = datetime.fromtimestamp(near, UTC).year
    found = (_seconds(stamp, one) for one in (year - 1, year, year + 1))
    known = [when for when in found if when is not None]
    return min(known, key=lambda when: abs(when - near), default=None)


def _seconds(stamp: Stamp, year: int) -> float | None:
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
        # Near year 1 or 9999, UTC does not have each moment of another time zone.
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).timestamp()
    except (ValueError, ArithmeticError):
        return None


def moment(dated: Iterable[Stamp | None], now: float) -> float:
    """Return a moment to which stamps without a year are near: the first of those that have one, or
    half a year ago, as a log is of the last year.
    """
    found = (seconds(stamp, now) for stamp in dated if stamp is not None)
    return next((when for when in found if when is not None), now - _HALF_A_YEAR)


def clock_of(origin: Origin) -> Clock:
    """Return the clock that stamps a line."""
    return origin.source if origin.host is None else origin.host
