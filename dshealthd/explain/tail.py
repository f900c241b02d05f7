"""The tail of a growing log: the data appended since the last read, a bounded amount each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dshealthd.explain import input as logs

if TYPE_CHECKING:
    from dshealthd.explain.recognition import Recognizer

MAX_REST = logs.MAX_LINE
"""Maximum bytes kept of a line that has no end yet."""


class Tail:
    """One file, identified by device and inode, and how far it has been read."""

    def __init__(
        self, recognizer: Recognizer, name: str, status: os.stat_result, rank: int | None = None
    ) -> None:
        """Begin at the start of a file; `name` is quoted in proofs.

        `rank` is the only rank that writes to it, if known.
        """
        self.identity = status.st_dev, status.st_ino
        self.offset = 0
        self._reader = recognizer.open(name, rank)
        self._examiner = logs.Examiner(recognizer.find, recognizer.found.statistics)
        self._work: Iterator[None] = iter(())
        """Steps that are left of what was read."""
        self.is_busy = False
        """Whether there may be such steps."""
        self._rest = b""
        self._cutting = False
        """Whether the current line is longer than MAX_REST, so the rest of it is dropped."""
        recognizer.found.statistics.files += 1

    def continues(self, status: os.stat_result) -> bool:
        """Return whether a file is still this log and was not truncated."""
        return (status.st_dev, status.st_ino) == self.identity and status.st_size >= self.offset

    def skip_to(self, offset: int) -> int:
        """Continue at the first line after an offset; return how many bytes are skipped."""
        skipped = offset - self.offset
        if skipped <= 0:
            return 0
        if self.offset:
            self._work = self._skip(self._work)
            self.is_busy = True
        self.offset = offset
        # An offset is rarely at the beginning of a line: the rest of that line is dropped.
        self._rest, self._cutting = b"", True
        return skipped

    def read(self, descriptor: int, limit: int) -> int:
        """Read at most `limit` bytes from the current offset; return how many were read.

        `work` examines them.
        """
        data = os.pread(descriptor, limit, self.offset)
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
            self._work = self._examine(self._work, block)
            self.is_busy = True
        return len(data)

    def work(self, is_over: Callable[[], bool]) -> None:
        """Examine what was read until `is_over`, which may be in the middle of a line; the next
        call continues there.
        """
        for _ in self._work:
            if is_over():
                return
        self.is_busy = False

    def _examine(self, before: Iterator[None], block: bytes) -> Iterator[None]:
        yield from before
        for item in self._examiner.take(block):
            yield from self._reader.take(item)
        # More may never come, so what is known is recognized now.
        yield from self._reader.pause()

    def _skip(self, before: Iterator[None]) -> Iterator[None]:
        yield from before
        yield from self._reader.take(self._examiner.skip())
