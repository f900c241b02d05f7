"""The page on which a worker of the probes counts its collectives, and onto which it prints."""

from __future__ import annotations

import fcntl
import os

from dshealthd.probe.workers import worker

BOARD = 64 << 10
"""Bytes of a page: of a worker that prints more, only the first of it is kept."""
PRINTED = 64
"""Where on a page the printed text begins, behind the counters."""
TAIL = 600
"""Characters of it that are told."""


class StatusPage:
    """A small file in memory that a process writes to and the agent reads when the process can no
    longer speak; it cannot grow.
    """

    def __init__(self) -> None:
        """Create the file."""
        self.descriptor = os.memfd_create("dshealthd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, BOARD)
        # Whatever a library prints in a loop ends at the size of the board, and the counters before
        # it cannot be cut off.
        fcntl.fcntl(
            self.descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        )
        # The worker's copies of this descriptor share its offset: what it prints begins here.
        os.lseek(self.descriptor, PRINTED, os.SEEK_SET)

    def counters(self) -> tuple[int, int]:
        """Return how many collectives the worker's page says were entered and left."""
        entered, left = worker.COUNTERS.unpack(os.pread(self.descriptor, worker.COUNTERS.size, 0))
        return entered, left

    def printed(self) -> str:
        """Return the last of what the worker printed on its page, on one line."""
        text = (
            os.pread(self.descriptor, BOARD - PRINTED, PRINTED)
            .rstrip(b"\0")[-TAIL:]
            .decode(errors="replace")
        )
        return "".join(character if character.isprintable() else " " for character in text).strip()

    def close(self) -> None:
        """Forget the file of the worker's page."""
        os.close(self.descriptor)
