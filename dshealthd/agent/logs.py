"""The agent's log: one line per event on standard error, in logfmt or JSON."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core import background, documents
from dshealthd.core.child import StartError
from dshealthd.core.collector import Sample, counter

if TYPE_CHECKING:
    from dshealthd.config.config import Log

DROPPED = counter(
    "dshealthd_log_lines_dropped_total",
    "Log lines dropped because standard error accepted none: a full pipe, or a hung target.",
)
WAITING = 1000
"""Most lines that wait for standard error, about 200 KiB; more are dropped."""


class _Formatter(logging.Formatter):
    """Formats a record's fields as logfmt or JSON."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if self._json:
            return documents.dumps(fields)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: str) -> str:
    """Quote a value that would not read as one word in a log line."""
    return (
        documents.dumps(value)
        if not value or set(value) & set(' ="') or not value.isprintable()
        else value
    )


class LineWriter:
    """Writes lines to a descriptor from a thread, and drops lines when its queue is full.

    The event loop never waits for the reader of the log. The thread is a daemon, so it does not
    keep the process from ending.
    """

    def __init__(self, descriptor: int, waiting: int = WAITING) -> None:
        """Write to `descriptor`; the thread starts with `start` or the first line."""
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(waiting)
        self._started = False
        self._untold = 0
        self.dropped = 0
        """Lines dropped so far."""

    def start(self) -> None:
        """Start the writing thread unless it runs. Raise StartError if it cannot start."""
        if not self._started:
            background.start(self._run, "log")
            self._started = True

    def put(self, line: str) -> None:
        """Queue a line of the log, or drop it; never waits, never raises."""
        try:
            self.start()
            self._lines.put_nowait(line)
        except (queue.Full, StartError):
            self.dropped += 1
            self._untold += 1

    def flush(self, seconds: float) -> None:
        """Wait until all lines of the log are written, for at most `seconds`."""
        # Waits on the queue's own condition: `time.sleep` raises EINVAL under libfaketime, which
        # would print a traceback into the log when the interpreter exits.
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, seconds)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            untold, self._untold = self._untold, 0
            self._write(line)
            if untold:
                self._write(f'level=warning msg="{untold} log lines dropped: not read in time"')
            self._lines.task_done()

    def _write(self, line: str) -> None:
        content = f"{line}\n".encode(errors="backslashreplace")
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:  # its reader has gone
            self.dropped += 1


class _Handler(logging.Handler):
    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.put(self.format(record))


writer = LineWriter(2)
"""The log of this process, on standard error."""


def samples() -> Iterator[Sample]:
    """Yield the number of dropped log lines."""
    yield DROPPED(float(writer.dropped))


def configure(log: Log) -> None:
    """Send all log records of this process to standard error as configured."""
    handler = _Handler(writer)
    handler.setFormatter(_Formatter(log.format))
    logging.basicConfig(level=log.level.upper(), handlers=[handler], force=True)
    with contextlib.suppress(StartError):  # retried with each line
        writer.start()  # now: the log must work when threads run short later
    atexit.register(writer.flush, 0.5)
