"""Following logs that are being written: the answer comes within two seconds of the decisive line.

Files are checked for new data twice a second; none is kept open, so a log may be moved away.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from dshealthd.explain import input as logs
from dshealthd.explain.causality import Finding, decide
from dshealthd.explain.recognition import Recognizer
from dshealthd.explain.tail import Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PERIOD = 0.5
MAX_DATA = 1 << 23
"""Maximum bytes read from a file at a time; a rank that prints faster is caught up with later."""


class Follower:
    """Reader of data appended to a set of logs."""

    def __init__(self, names: Sequence[str]) -> None:
        self.recognizer = Recognizer()
        self._names = names
        self._files: dict[str, Tail] = {}

    def poll(self) -> bool:
        """Read new data from the followed logs; return whether there was any."""
        grown = False
        for name in self._expand():
            try:
                grown |= self._take(name)
            except OSError:  # moved away in between, not readable, or not a file
                continue
        return grown

    def _expand(self) -> list[str]:
        try:
            return logs.expand(self._names)
        except logs.InputError:  # does not exist yet
            return list(self._files)

    def _take(self, name: str) -> bool:
        with logs.open_file(name) as file:
            status = os.fstat(file.fileno())
            tail = self._files.get(name)
            if tail is None or not tail.continues(status):
                tail = self._files[name] = Tail(self.recognizer, name, status)
            end = min(status.st_size, tail.offset + MAX_DATA)
            grown = False
            while tail.offset < end and tail.take(file.fileno(), end - tail.offset):
                grown = True
        return grown


def follow(
    names: Sequence[str], *, year: int, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Finding, Recognizer]]:
    """Follow logs and yield the answer each time it changes; the first covers existing data."""
    follower = Follower(names)
    told: tuple[object, ...] | None = None
    while True:
        if follower.poll() or told is None:
            finding = decide(follower.recognizer.found, year=year)
            now = finding.outcome, finding.slug, finding.ranks
            if now != told:
                told = now
                yield finding, follower.recognizer
        sleep(PERIOD)
