"""The page of memory on which a worker reports how far it is, and what it prints."""

from __future__ import annotations

import fcntl
import os

from dshealthd.probe.workers import worker

BOARD = 64 << 10
"""Bytes of a page; a worker's output beyond that is lost."""
PRINTED = worker.COUNTERS.size
"""Offset of the printed text on a page, after the counters."""
TAIL = 600
"""Last bytes of the printed text that are reported."""


class StatusPage:
    """A small memory file of fixed size that a process writes to; the agent can read it after the
    process has hung or died.
    """

    def __init__(self) -> None:
        """Create the memory file of a worker's page."""
        self.descriptor = os.memfd_create("dshealthd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, BOARD)
        # A library that prints in a loop cannot grow the page, and nothing can cut off the
        # counters.
        fcntl.fcntl(
            self.descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        )
        # The worker's copies of this descriptor share its offset, so its output starts here.
        os.lseek(self.descriptor, PRINTED, os.SEEK_SET)

    def counters(self) -> tuple[int, int]:
        """Return how many collectives the worker's page says were entered and left."""
        entered, left = worker.COUNTERS.unpack(os.pread(self.descriptor, PRINTED, 0))
        return entered, left

    def printed(self) -> str:
        """Return the end of the worker's printed output on one line."""
        text = (
            os.pread(self.descriptor, BOARD - PRINTED, PRINTED)
            .rstrip(b"\0")[-TAIL:]
            .decode(errors="replace")
        )
        return "".join(character if character.isprintable() else " " for character in text).strip()

    def close(self) -> None:
        """Close the file of the worker's page."""
        os.close(self.descriptor)
