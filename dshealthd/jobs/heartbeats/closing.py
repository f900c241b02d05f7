"""The closer of descriptors that senders of heartbeats handed over, which never waits for it.

To close a connection closes the descriptors that its sender put into it, and to close a TCP socket
that lingers takes as long as its owner wishes: two of them, and everybody waits. The kernel does
not linger where a task ends (PF_EXITING in `inet_release`). So a thread takes a copy of the table
of descriptors, the loop closes its own, and the end of the thread closes the last copies.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.child import StartError

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

MAX_THREADS = 64
"""Threads at a time; one ends within milliseconds, unless a file system hangs with its files."""
_FINISHING = 0.05
"""Seconds between the turns of `finish`."""
_CLONE_FILES = 0x400
_LAST = 1 << 30
"""Beyond every descriptor; the kernel's own limit is fs.nr_open."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Batch:
    """Descriptors that one thread closes by its end."""

    def __init__(self, files: list[int]) -> None:
        self.files = files
        self.copied = threading.Event()
        self.closed = threading.Event()
        self.ended = False

    def run(self) -> None:
        """Hold the files, and nothing else, until the loop has closed them; a thread's target."""
        try:
            if _libc.unshare(_CLONE_FILES):
                error = os.strerror(ctypes.get_errno())
                log.warning("heartbeats: unshare(CLONE_FILES): %s", error)
                for file in self.files:  # then this thread alone waits
                    os.close(file)
                self.closed.set()
                return
            # what is the agent's must be closed when the agent closes it, not when this ends
            before = -1
            for file in sorted(self.files):
                os.closerange(before + 1, file)
                before = file
            os.closerange(before + 1, _LAST)
            self.copied.set()
            self.closed.wait()
        finally:
            self.ended = True


class Closer:
    """Closes descriptors batch by batch; `turn` is called by the clock."""

    def __init__(self) -> None:
        """Begin with nothing to close."""
        self._waiting: deque[int] = deque()
        self._batches: list[_Batch] = []

    def __len__(self) -> int:
        """Return how many descriptors are still open."""
        held = sum(len(batch.files) for batch in self._batches if not batch.closed.is_set())
        return len(self._waiting) + held

    def put(self, file: int) -> None:
        """Have a descriptor closed, which is the closer's from now on. Any thread may call this."""
        self._waiting.append(file)

    def finish(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close all, with turns of its own; the end of the agent closes what is left by then."""
        self.turn()
        if len(self) and not loop.is_closed():
            loop.call_later(_FINISHING, self.finish, loop)

    def turn(self) -> None:
        """Go on closing descriptors; never waits."""
        for batch in self._batches:
            if batch.copied.is_set() and not batch.closed.is_set():
                for file in batch.files:
                    os.close(file)
                batch.closed.set()
        self._batches = [batch for batch in self._batches if not batch.ended]
        if not self._waiting or len(self._batches) >= MAX_THREADS:
            return
        batch = _Batch([self._waiting.popleft() for _ in range(len(self._waiting))])
        try:
            background.start(batch.run, "heartbeat senders that have gone")
        except StartError as error:
            self._waiting.extendleft(batch.files)
            log.warning("%s", error)
            return
        self._batches.append(batch)
