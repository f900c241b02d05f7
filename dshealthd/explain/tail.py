"""The tail of a log that grows: what was appended since the last look, a bounded amount each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dshealthd.explain import input as logs

if TYPE_CHECKING:
    from dshealthd.explain.recognition import Recogniser

MAX_TAKEN = 1 << 20
"""Bytes that are examined at a time."""
MAX_REST = logs.MAX_LINE
"""Bytes that are kept of a line that has no end yet."""


class Tail:
    """One file, known by device and inode, and how far it has been read."""

    def __init__(
        self,
        recogniser: Recogniser,
        name: str,
        status: os.stat_result,
        rank: int | None = None,
    ) -> None:
        """Begin at the start of a file; `name` is what the proof will quote.

        `rank` is the only one that writes to it, where that is known.
        """
        self.identity = status.st_dev, status.st_ino
        self.offset = 0
        self._reader = recogniser.open(name, rank)
        self._examiner = logs.Examiner(recogniser.find, recogniser.found.statistics)
        self._rest = b""
        self._cutting = False
        """Whether the line that is being read is longer than what is kept of it."""
        recogniser.found.statistics.files += 1

    def continues(self, status: os.stat_result) -> bool:
        """Tell whether a file is still this growing log, and was not truncated."""
        return (status.st_dev, status.st_ino) == self.identity and status.st_size >= self.offset

    def skip_to(self, offset: int) -> int:
        """Go on in the log at an offset, from the next line; return how many bytes are left out."""
        skipped = offset - self.offset
        if skipped <= 0:
            return 0
        if self.offset:
            self._reader.take(self._examiner.skip())
        self.offset = offset
        # An offset is seldom the beginning of a line: the rest of that line is dropped.
        self._rest, self._cutting = b"", True
        return skipped

    def take(self, descriptor: int, limit: int) -> int:
        """Read at most so many bytes of the growing log from where it was left; return how many."""
        data = os.pread(descriptor, min(limit, MAX_TAKEN), self.offset)
        self.offset += len(data)
        if self._cutting:
            end = data.find(b"\n") + 1
            if not end:
                return len(data)
            whole, self._cutting = data[end:], False
        else:
            whole = self._rest + data
        end = whole.rfind(b"\n") + 1
        block, self._rest = whole[:end], whole[end:]
        if len(self._rest) > MAX_REST:
            block, self._rest, self._cutting = block + self._rest[:MAX_REST] + b"\n", b"", True
        if block:
            for item in self._examiner.take(block):
                self._reader.take(item)
            # Nobody knows whether more will come: what is known now is shown now.
            self._reader.pause()
        return len(data)
