"""The files in `path.state`, read and written so that the loop never waits for their disk."""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from dshealthd.core import background, schema, state_file
from dshealthd.core.child import StartError
from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.timing import holds

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

T = TypeVar("T")

FAILED = counter(
    "dshealthd_state_write_failures_total",
    "Writes of a file in path.state that failed or could not begin.",
    "file",
)
LAST = gauge(
    "dshealthd_state_write_last_success_timestamp_seconds",
    "Unix time of the last write of a file in path.state; absent before the first.",
    "file",
)
HUNG = gauge(
    "dshealthd_state_write_running_seconds",
    "Age of the write in progress; 0 if there is none. It grows while the disk hangs.",
    "file",
)

DEADLINE = 2.0
"""Seconds to read, list or write files, or to create their directory, which takes some 20 ms: a
hung disk must not keep the agent waiting.
"""
_writers: weakref.WeakValueDictionary[str, LatestWriter] = weakref.WeakValueDictionary()


def samples() -> Iterator[Sample]:
    """Yield the metrics of this process's state writes."""
    for name, writer in _writers.items():
        yield FAILED(float(writer.failures), name)
        if writer.last_success:
            yield LAST(writer.last_success, name)
        yield HUNG(writer.hung_for(), name)


async def wait_until_written(seconds: float) -> list[str]:
    """Wait at most `seconds` until all state is written; return the names of unwritten files."""

    def busy() -> list[str]:
        return [name for name, writer in _writers.items() if writer.busy]

    await holds(lambda: not busy(), seconds)
    return busy()


class LatestWriter:
    """Writes one file repeatedly: at most one write runs, and the newest content waits.

    There is no thread while nothing is written. If a write hangs, newer content replaces the
    waiting one, so memory stays bounded.
    """

    def __init__(self, write: Callable[[bytes], None], name: str) -> None:
        """`write` replaces the file in a thread, or raises OSError; `name` is its metrics label."""
        self._write = write
        self._name = name
        self._lock = threading.Lock()
        self._next: bytes | None = None
        self._running = False
        self._began = 0.0
        self.error: OSError | None = None
        """Why the last write failed; None if it did not."""
        self.written = 0
        """Number of successful writes."""
        self.failures = 0
        """Number of writes that failed or could not begin."""
        self.last_success = 0.0
        """Unix time of the last write that succeeded; 0 if none did."""
        _writers[name] = self

    @property
    def busy(self) -> bool:
        """Whether a write of the state file is running or waiting."""
        return self._running

    def hung_for(self) -> float:
        """Return the age in seconds of the state's write in progress; 0 if there is none."""
        return time.monotonic() - self._began if self._running else 0.0

    def put(self, content: bytes) -> None:
        """Queue this state, replacing a waiting one. Raise StartError if no thread starts."""
        with self._lock:
            self._next = content
            # The running thread takes it when it is done, under the same lock, so it cannot end
            # first.
            if self._running:
                return
            self._running, self._began = True, time.monotonic()
        try:
            background.start(self._run, f"state of {self._name}")
        except StartError as error:
            with self._lock:
                self._running, self._next, self.error = False, None, error
                self.failures += 1
            raise

    def _run(self) -> None:
        while True:
            with self._lock:
                content, self._next = self._next, None
                # End instead of waiting for more: a thread per file that is written every few
                # minutes would waste memory.
                if content is None:
                    self._running = False
                    return
            self._began = time.monotonic()
            try:
                self._write(content)
            except OSError as error:
                if self.error is None:
                    log.warning("state of %s is not written: %s", self._name, error)
                self.error = error
                self.failures += 1
            else:
                self.error = None
                self.written += 1
                self.last_success = time.time()


class StateFile:
    """A JSON file in `path.state` that is read once and then replaced as a whole.

    Without a directory, nothing is kept.
    """

    def __init__(
        self, directory: Path | None, name: str, limit: int, *, durable: bool = False
    ) -> None:
        """Name the file after `name`, of which at most `limit` bytes are read; a `durable` one
        survives a loss of power.
        """
        self.place = "" if directory is None else f"{directory}/{name}.json"
        self._name, self._limit = name, limit
        self._writer: LatestWriter | None = None
        if self.place:
            write = functools.partial(state_file.replace_in_child, self.place, durable=durable)
            self._writer = LatestWriter(write, name)

    async def load(self) -> Any:
        """Return the state file's document, None without a file. SchemaError, or an OSError that
        says why it cannot be read.
        """
        if not self.place:
            return None
        read = functools.partial(state_file.read_in_child, self.place, self._limit)
        try:
            return schema.document(await self._call(read)) or schema.misfit("it", "is empty")
        except FileNotFoundError:
            return None

    async def set_aside(self) -> None:
        """Rename the state file, whose content is invalid, to `*.bad`. OSError."""
        await self._call(functools.partial(state_file.set_aside_in_child, self.place))

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            name = f"state of {self._name}"
            return await background.call(function, name, DEADLINE, OSError)
        except TimeoutError as error:
            why = f"the disk does not answer within {DEADLINE:g} s"
            raise TimeoutError(errno.ETIMEDOUT, why, self.place) from error

    def save(self, content: str) -> None:
        """Write this state in the background, in place of what waits for its turn."""
        try:
            if self._writer is not None:
                self._writer.put(content.encode())
        except StartError as error:
            log.warning("%s is not written: %s", self.place, error)
