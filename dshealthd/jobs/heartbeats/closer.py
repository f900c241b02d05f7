"""Closes the files of heartbeat senders in threads that nothing waits for: a close may hang."""

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
"""Most threads at a time; each ends within milliseconds, unless its files' file system hangs."""
_FINISHING = 0.05
"""Seconds between the turns of `finish`."""
_CLONE_FILES = 0x400
"""`CLONE_FILES` of linux/sched.h."""
_LAST = 1 << 30
"""A number beyond every descriptor; the kernel's own limit is fs.nr_open."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Batch:
    """Descriptors that one thread closes by exiting."""

    def __init__(self, files: list[int]) -> None:
        self.files = files
        self.copied = threading.Event()
        self.closed = threading.Event()
        self.ended = False

    def run(self) -> None:
        """Hold the files, and no others, until the loop has closed them; the thread's target."""
        try:
            if _libc.unshare(_CLONE_FILES):
                error = os.strerror(ctypes.get_errno())
                log.warning("heartbeats: unshare(CLONE_FILES): %s", error)
                for file in self.files:  # only this thread waits then
                    os.close(file)
                self.closed.set()
                return
            # the agent's own descriptors must close when the agent closes them, not at this exit
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
    """A closer that works in batches; `turn` is called periodically."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        self._batches: list[_Batch] = []

    def __len__(self) -> int:
        """Return how many descriptors are still open."""
        held = sum(len(batch.files) for batch in self._batches if not batch.closed.is_set())
        return len(self._waiting) + held

    def put(self, file: int) -> None:
        """Queue a descriptor, which the closer owns from now on. Any thread may call this."""
        self._waiting.append(file)

    def finish(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close everything, scheduling its own turns; the agent's exit closes the rest."""
        self.turn()
        if len(self) and not loop.is_closed():
            loop.call_later(_FINISHING, self.finish, loop)

    def turn(self) -> None:
        """Continue closing descriptors, without blocking."""
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
