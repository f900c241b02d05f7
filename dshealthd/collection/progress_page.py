"""A page of memory shared by a worker and the agent: the part the worker is at, and since when.

The worker writes it before each part it touches; the agent reads it only when an answer is
overdue. Neither needs a system call for that.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Self


class ProgressPage:
    """The page, mapped by either of the two."""

    _HEAD = struct.Struct("=QdI")
    _SIZE = 4096
    _STOP = _SIZE - 1
    """The last byte of the page: set by the agent to stop the worker before its next part."""

    def __init__(self, descriptor: int) -> None:
        """Map the page of a descriptor from `create`."""
        self._page = mmap.mmap(descriptor, self._SIZE)
        self._count = 0

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Return a new mapped page, and its descriptor for the worker, or raise OSError."""
        descriptor = os.memfd_create("progress")
        try:
            os.truncate(descriptor, cls._SIZE)
            return cls(descriptor), descriptor  # mapping it takes another descriptor
        except OSError:
            os.close(descriptor)
            raise

    def write(self, now: float, collector: str, part: str) -> None:
        """Record on the page that a collector is about to touch a part (none, if empty).

        `now` is monotonic time in seconds.
        """
        text = f"{collector}\n{part}".encode()[: self._STOP - self._HEAD.size]
        self._count += 2
        self._HEAD.pack_into(self._page, 0, self._count - 1, now, len(text))  # odd: being written
        self._page[self._HEAD.size : self._HEAD.size + len(text)] = text
        self._HEAD.pack_into(self._page, 0, self._count, now, len(text))

    def read(self) -> tuple[float, str, str]:
        """Return since when (monotonic seconds) the worker is at which collector and part.

        Both are empty while the page is being written.
        """
        count, since, length = self._HEAD.unpack_from(self._page)
        text = self._page[self._HEAD.size : self._HEAD.size + min(length, self._STOP)]
        # A sequence lock whose reader does not retry: the worker may have died in the middle of a
        # write. The page is read again soon anyway.
        if count % 2 or self._HEAD.unpack_from(self._page)[0] != count:
            return since, "", ""
        collector, _, part = text.decode(errors="replace").partition("\n")
        return since, collector, part

    def stop(self) -> None:
        """Request on the page that the worker end before it touches another part."""
        self._page[self._STOP] = 1

    @property
    def stopped(self) -> bool:
        """Whether the agent has requested the worker's end."""
        return bool(self._page[self._STOP])
