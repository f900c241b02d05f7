"""Clocks of logs: what timestamps in different formats mean, and how far hosts may be apart.

Stamps without a time zone count as UTC.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.explain.events import Origin, Stamp

Clock: TypeAlias = "str | int"
"""A host name, or the number of a file whose host is unknown."""
UNCERTAINTY = 5.0
"""Seconds by which the clocks of two hosts may differ, as seen in clusters without NTP."""
LEAST = 0.05
"""Seconds within which ranks print an event that happens on all at once."""
ENOUGH = 3
"""Moments that two clocks must share: a single one does not show how far it is off."""
_ISO = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?(Z|[+-]\d\d:?\d\d)?"
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
            when = datetime(*(int(match[part]) for part in range(1, 7)), tzinfo=zone)  # type: ignore[arg-type,misc]
            return when.timestamp() + float(f"0.{match[7] or 0}")
        if stamp.form == "glog" and (match := _GLOG.match(stamp.text)):
            when = datetime(year, *(int(match[part]) for part in range(1, 6)), tzinfo=UTC)  # type: ignore[arg-type,misc]
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


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the clocks of a job are ahead of one of them, and how certain that is."""

    offsets: Mapping[Clock, tuple[float, float, Clock]] = field(default_factory=dict)
    """Seconds ahead, seconds of uncertainty, and the reference clock."""

    def right(self, clock: Clock, seconds: float) -> float:
        """Return a time by the reference clock."""
        return seconds - self.offsets[clock][0] if clock in self.offsets else seconds

    def uncertainty(self, one: Clock, other: Clock) -> float:
        """Return the seconds within which the times of two clocks count as equal."""
        if one == other:
            return 0.0
        first, second = self.offsets.get(one), self.offsets.get(other)
        if first is None or second is None or first[2] != second[2]:
            return UNCERTAINTY
        return first[1] + second[1]


def compare(shared: Mapping[Clock, Mapping[str, Stamp]], year: int) -> Clocks:
    """Work out the offsets of clocks from moments that several of them saw.

    The clock that shares the most is the reference. Clocks that share too little with it are
    compared with one that does share enough, and the uncertainties add up.
    """
    times = {
        clock: {key: when for key, stamp in moments.items() if (when := seconds(stamp, year))}
        for clock, moments in shared.items()
    }
    left = sorted(times, key=lambda clock: (-len(times[clock]), str(clock)))
    found: dict[Clock, tuple[float, float, Clock]] = {}
    while left:
        base = left.pop(0)
        # The others share no more than this one.
        if len(times[base]) < ENOUGH:
            break
        found[base] = 0.0, 0.0, base
        queue = [base]
        # The queue grows while it is walked: breadth first, so that each clock is compared through
        # as few others as possible.
        for known in queue:
            for clock in list(left):
                apart = [
                    when - times[known][key]
                    for key, when in times[clock].items()
                    if key in times[known]
                ]
                if len(apart) >= ENOUGH:
                    middle = statistics.median(apart)
                    spread = max(LEAST, *(abs(value - middle) for value in apart))
                    offset, before, _ = found[known]
                    found[clock] = offset + middle, before + spread, base
                    left.remove(clock)
                    queue.append(clock)
    return Clocks(found)
