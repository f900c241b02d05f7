"""Limits on what a station sends on one interface: all of it, or what goes to one address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.lab.station import Station

_EVERYTHING = 0xFFF


class Shaper:
    """An `htb` root whose classes end in a `tbf` each.

    What no filter sends to a class passes at full rate.
    """

    def __init__(self, station: Station, device: str) -> None:
        """Prepare; the interface stays as it is while there is no limit."""
        self._station, self._device = station, device
        self._classes: set[int] = set()

    @contextlib.contextmanager
    def limit(self, mbit: int, destination: str = "") -> Iterator[None]:
        """Limit what goes to an address, or with "" all that no such limit takes, to so many
        Mbit/s.
        """
        number = (
            next(n for n in range(1, _EVERYTHING) if n not in self._classes)
            if destination
            else _EVERYTHING
        )
        if number in self._classes:
            message = f"{self._device} of {self._station.name} is limited already"
            raise ValueError(message)
        if not self._classes:
            self._tc("qdisc", "add", "root handle 1: htb default 0")
        self._classes.add(number)
        try:
            self._add(number, mbit, destination)
            yield
        finally:
            self._classes.discard(number)
            if self._classes:
                self._tc("filter", "del", f"parent 1: prio {number}")
                self._tc("class", "del", f"classid 1:{number:x}")
            else:
                self._tc("qdisc", "del", "root")

    def _add(self, number: int, mbit: int, destination: str) -> None:
        """Add class, bucket and filter; the filters' priorities put addresses before everything."""
        classid = f"1:{number:x}"
        burst = max(32 * 1024, mbit * 10**6 // 8 // 100)
        bucket = f"rate {mbit}mbit burst {burst} limit {4 * burst}"
        match = f"ip dst {destination}/32" if destination else "u32 0 0"
        self._tc("class", "add", f"parent 1: classid {classid} htb rate 10gbit quantum 65536")
        self._tc("qdisc", "add", f"parent {classid} tbf {bucket}")
        flow = f"u32 match {match} flowid {classid}"
        self._tc("filter", "add", f"parent 1: protocol ip prio {number} {flow}")

    def _tc(self, kind: str, action: str, rest: str) -> None:
        self._station.tool("tc", kind, action, "dev", self._device, *rest.split())
