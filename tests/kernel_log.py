"""A kernel log that tests write to, in the place of the device, which no test may write to."""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path

from dshealthd.linux.kmsg import kernel_clock


class KernelLog:
    """A FIFO in the place of /dev/kmsg, from which one write is one record, as with the device."""

    def __init__(self, place: Path) -> None:
        """Make it; it stays open for writing, so that the agent finds it as open as the device."""
        place.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(place)
        self._end = os.open(place, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(self._end, fcntl.F_SETFL, os.O_DIRECT | os.O_NONBLOCK)
        fcntl.fcntl(self._end, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for 256 records
        self._sequence = itertools.count()
        self.say("Linux version 6.1.0")

    def say(self, message: str, *, facility: int = 0, seconds: float | None = None) -> None:
        """Have the kernel say something, now or at `seconds` of its clock; or a process, with
        another facility.
        """
        microseconds = round((kernel_clock() if seconds is None else seconds) * 1e6)
        head = f"{facility << 3 | 4},{next(self._sequence)},{microseconds},-"
        os.write(self._end, f"{head};{message}\n".encode())

    def close(self) -> None:
        """Close it."""
        os.close(self._end)
