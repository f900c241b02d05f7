"""Limits on what a station sends on one interface: all of it, or what goes to one address."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.station import Station

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_ROOT = "1:"
_EVERYTHING = 0xFFF


def bits_per_second(rate: str) -> int:
    """Return what a rate such as "20mbit" says; ValueError when it says nothing."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        message = f'"{rate}" is not a rate such as "512kbit", "20mbit" or "1gbit"'
        raise ValueError(message)
    return int(float(match[1]) * _UNITS[match[2]])


class Shaper:
    """An `htb` root whose classes end in a `tbf` each.

    What no filter sends to a class passes at full rate.
    """

    def __init__(self, station: Station, device: str) -> None:
        """Prepare; the interface stays as it is while there is no limit."""
        self._station, self._device = station, device
        self._classes: set[int] = set()

    @contextlib.contextmanager
    def limit(self, rate: str, destination: str = "") -> Iterator[None]:
        """Limit what goes to an address, or with "" all that no such limit takes."""
        bits = bits_per_second(rate)
        number = (
            next(n for n in range(1, _EVERYTHING) if n not in self._classes)
            if destination
            else _EVERYTHING
        )
        if number in self._classes:
            message = f"{self._device} of {self._station.name} is limited already"
            raise ValueError(message)
        if not self._classes:
            self._tc("qdisc", "add", "root", "handle", _ROOT, "htb", "default", "0")
        self._classes.add(number)
        try:
            self._add(number, bits, destination)
            yield
        finally:
            self._classes.discard(number)
            if self._classes:
                self._tc("filter", "del", "parent", _ROOT, "prio", str(number))
                self._tc("class", "del", "classid", f"{_ROOT}{number:x}")
            else:
                self._tc("qdisc", "del", "root")

    def _add(self, number: int, bits: int, destination: str) -> None:
        """Add class, bucket and filter; the filters' priorities put addresses before everything."""
        classid = f"{_ROOT}{number:x}"
        burst = max(32 * 1024, bits // 8 // 100)
        match = ["ip", "dst", f"{destination}/32"] if destination else ["u32", "0", "0"]
        self._tc(
            "class",
            "add",
            "parent",
            _ROOT,
            "classid",
            classid,
            "htb",
            "rate",
            "10gbit",
            "quantum",
            "65536",
        )
        self._tc(
            "qdisc",
            "add",
            "parent",
            classid,
            "tbf",
            "rate",
            f"{bits}bit",
            "burst",
            str(burst),
            "limit",
            str(4 * burst),
        )
        self._tc(
            "filter",
            "add",
            "parent",
            _ROOT,
            "protocol",
            "ip",
            "prio",
            str(number),
            "u32",
            "match",
            *match,
            "flowid",
            classid,
        )

    def _tc(self, kind: str, action: str, *rest: str) -> None:
        self._station.tool("tc", kind, action, "dev", self._device, *rest)
