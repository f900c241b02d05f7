"""A kernel log that tests write to, in the place of the device, which no test may write to."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class KernelLog:
    """A FIFO in the place of /dev/kmsg, from which one write is one record, as with the device."""

    def __init__(self, place: Path) -> None:
        """Make it; it stays open for writing, so that the agent finds it as open as the device."""
        place.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(place)
        self._end = os.open(place, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(self._end, fcntl.F_SETFL, os.O_DIRECT | os.O_NONBLOCK)
        self._sequence = itertools.count()
        self.say("Linux version 6.1.0")

    def say(self, message: str) -> None:
        """Have the kernel say something."""
        microseconds = round(time.monotonic() * 1e6)
        os.write(self._end, f"4,{next(self._sequence)},{microseconds},-;{message}\n".encode())

    def close(self) -> None:
        """Close it."""
        os.close(self._end)
