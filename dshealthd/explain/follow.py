"""Logs that are still being written: the verdict within two seconds of the line that tells it.

New data are looked for twice a second; nothing is held open, so that a log may be moved away.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.explain import input as logs
from dshealthd.explain.causality import Finding, decide
from dshealthd.explain.recognition import Reader, Recogniser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PERIOD = 0.5
MAX_DATA = 1 << 23
"""Bytes of one file that are taken at a time: a rank that prints faster is caught up with later."""


@dataclass(slots=True)
class _Followed:
    reader: Reader
    identity: tuple[int, int]
    offset: int = 0
    lines: int = 0
    rest: bytes = b""


class Follower:
    """Reads what is appended to some logs."""

    def __init__(self, names: Sequence[str]) -> None:
        self.recogniser = Recogniser()
        self._names = names
        self._files: dict[str, _Followed] = {}

    def poll(self) -> bool:
        """Take what is new; return whether anything was."""
        grown = False
        for name in self._expand():
            try:
                grown |= self._take(name)
            except OSError:  # moved away between two looks, or not ours to read
                continue
        return grown

    def _expand(self) -> list[str]:
        try:
            return logs.expand(self._names)
        except logs.InputError:  # not there yet
            return list(self._files)

    def _take(self, name: str) -> bool:
        status = os.stat(name)
        identity = status.st_dev, status.st_ino
        followed = self._files.get(name)
        if followed is None or followed.identity != identity or status.st_size < followed.offset:
            followed = _Followed(self.recogniser.open(name), identity)
            self._files[name] = followed
        if status.st_size == followed.offset:
            return False
        with open(name, "rb") as file:
            file.seek(followed.offset)
            data = file.read(MAX_DATA)
        followed.offset += len(data)
        *whole, followed.rest = (followed.rest + data).split(b"\n")
        if len(followed.rest) > MAX_DATA:
            followed.rest = followed.rest[: logs.MAX_LINE]
        for line in whole:
            followed.lines += 1
            for part in line[: logs.MAX_LINE].decode("utf-8", "replace").split("\r"):
                if part.strip():
                    followed.reader.take(logs.Raw(followed.lines, part))
        followed.reader.pause()
        return True


def follow(
    names: Sequence[str], *, year: int, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Finding, Recogniser]]:
    """Return the answer each time that it changes; the first is of what is there already."""
    follower = Follower(names)
    told: tuple[object, ...] | None = None
    while True:
        if follower.poll() or told is None:
            finding = decide(follower.recogniser.found, year=year)
            now = finding.outcome, finding.slug, finding.ranks
            if now != told:
                told = now
                yield finding, follower.recogniser
        sleep(PERIOD)
