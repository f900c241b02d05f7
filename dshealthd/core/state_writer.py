"""The writer of the files in `path.state`, by which the loop never waits for their disk."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.child import StartError
from dshealthd.core.collector import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.core.collector import Sample

WRITTEN = counter(
    "dshealthd_state_writes_total", "Files of path.state written, by what they keep.", "file"
)
FAILED = counter(
    "dshealthd_state_write_failures_total",
    "Writes of a file of path.state that failed or could not begin.",
    "file",
)
LAST = gauge(
    "dshealthd_state_write_last_success_timestamp_seconds",
    "Unix time of the last write of a file of path.state; absent before the first.",
    "file",
)
HUNG = gauge(
    "dshealthd_state_write_running_seconds",
    "Age of the write in progress; 0 if there is none. It grows while the disk hangs.",
    "file",
)
METRICS = (WRITTEN, FAILED, LAST, HUNG)

_POLL = 0.01
"""Seconds between two looks whether all is written; a write takes some 20 ms."""
_writers: weakref.WeakValueDictionary[str, LatestWriter] = weakref.WeakValueDictionary()


def samples() -> Iterator[Sample]:
    """Yield what became of the state writes of this process."""
    for name, writer in sorted(_writers.items()):
        yield WRITTEN(float(writer.written), name)
        yield FAILED(float(writer.failures), name)
        if writer.last_success:
            yield LAST(writer.last_success, name)
        yield HUNG(writer.hung_for(), name)


async def settled(seconds: float) -> list[str]:
    """Wait until all state is written, at most so long; return the names of what still is not."""
    end = time.monotonic() + seconds
    while True:
        busy = [name for name, writer in _writers.items() if writer.busy]
        if not busy or time.monotonic() >= end:
            return busy
        await asyncio.sleep(_POLL)


class LatestWriter:
    """Writes one file again and again: at most one write runs and one waits, the newest.

    There is no thread while nothing is written. If a write hangs, later contents replace the one
    that waits, and memory stays bounded.
    """

    def __init__(self, write: Callable[[bytes], None], name: str) -> None:
        """`write` replaces the file, OSError, in a thread; `name` is its label in metrics."""
        self._write = write
        self._name = name
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._next: bytes | None = None
        self._running = False
        self._began = 0.0
        self.error: OSError | None = None
        """Why the last write failed; None if it did not."""
        self.written = 0
        """Contents written so far."""
        self.failures = 0
        """Writes that failed, or could not begin."""
        self.last_success = 0.0
        """Unix time of the last write that succeeded; 0 if none did."""
        _writers[name] = self

    @property
    def busy(self) -> bool:
        """Whether some state is still to be written."""
        return self._running

    def hung_for(self) -> float:
        """Return for how many seconds the state write in progress has taken; 0 if there is none."""
        return time.monotonic() - self._began if self._running else 0.0

    def put(self, content: bytes) -> None:
        """Have this state written, in place of what waits. StartError without a thread."""
        with self._lock:
            self._next = content
            # The running thread takes it when it is done, under the same lock: it cannot end in
            # between.
            if self._running:
                return
            self._running, self._began = True, time.monotonic()
            self._idle.clear()
        try:
            background.start(self._run, f"state of {self._name}")
        except StartError as error:
            with self._lock:
                self._running, self._next, self.error = False, None, error
                self.failures += 1
                self._idle.set()
            raise

    def wait(self, seconds: float) -> bool:
        """Wait until all state is written; False if it is not after so many seconds."""
        return self._idle.wait(seconds)

    def _run(self) -> None:
        while True:
            with self._lock:
                content, self._next = self._next, None
                # Ends here instead of waiting for the next: a thread for each file that is written
                # every few minutes would only take memory.
                if content is None:
                    self._running = False
                    self._idle.set()
                    return
            self._began = time.monotonic()
            try:
                self._write(content)
            except OSError as error:
                self.error = error
                self.failures += 1
            else:
                self.error = None
                self.written += 1
                self.last_success = time.time()
