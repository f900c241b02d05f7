"""Streaks: counts of consecutive checks of this node with the same finding, kept between runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.core import state_file
from dshealthd.core.host import read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_POLL = 0.1


class Busy(Exception):
    """Another check of this node is running."""


@dataclass(slots=True)
class Streaks:
    """Counts of consecutive checks."""

    bad: dict[str, int] = field(default_factory=dict)
    """Checks in a row with each finding."""
    clean: int = 0
    """Checks in a row without a finding."""
    noted: bool = False
    """Whether we have left a note in the comment of the node."""

    def count_bad(self, keys: Iterable[str]) -> int:
        """Extend the streaks of these findings, end all others, and return the longest."""
        self.bad = {key: self.bad.get(key, 0) + 1 for key in keys}
        self.clean = 0
        return max(self.bad.values(), default=0)

    def count_clean(self) -> int:
        """Extend the streak of checks of this node without a finding; return its length."""
        self.bad = {}
        self.clean += 1
        return self.clean

    def count_unknown(self) -> None:
        """Reset the streaks: an unknown result confirms nothing."""
        self.bad = {}
        self.clean = 0


@contextlib.contextmanager
def kept(directory: Path, patience: float) -> Iterator[Streaks]:
    """Lock the streaks of this node, and write them at the end.

    Raises Busy if another check holds them for longer than `patience` seconds, OSError if the
    directory cannot be used or belongs to somebody else.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    status = os.lstat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o22:
        message = "belongs to another user, or others may write to it"
        raise PermissionError(message)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(lock, patience)
        place = directory / "streaks.json"
        streaks = _read(place)
        yield streaks
        content = {"bad": streaks.bad, "clean": streaks.clean, "noted": streaks.noted}
        # Not durable: findings from before a reboot confirm nothing.
        state_file.replace(place, json.dumps(content).encode(), durable=False)
    finally:
        os.close(lock)


def _lock(descriptor: int, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= end:
                message = "another check of this node is running"
                raise Busy(message) from error
            time.sleep(_POLL)
        else:
            return


def _read(place: Path) -> Streaks:
    """Return the saved streaks; empty ones if there are none or they cannot be parsed."""
    try:
        content = json.loads(read(str(place)))
        bad = {str(key): int(value) for key, value in content["bad"].items()}
        return Streaks(bad, int(content["clean"]), bool(content["noted"]))
    except FileNotFoundError:
        return Streaks()
    except (ValueError, KeyError, TypeError, AttributeError):
        return Streaks()  # writes are atomic, so another version wrote this: start counting again
