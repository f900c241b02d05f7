"""Input of logs in any form: files, folders, glob patterns, standard input, compressed or not.

Logs are read in blocks, in one pass. Lines far from any possible match are counted but not
examined, which makes it fast. Memory does not grow with the size of a file or of a line.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, Any, NamedTuple, TypeAlias, cast

from dshealthd.explain.streams import ANSI
from dshealthd.linux import regular_files

BLOCK = 1 << 18
"""Bytes read at a time: few enough to stay in a core's own cache while they are searched."""
BEFORE, AFTER = 1 << 10, 1 << 12
"""Bytes around a match that are also examined: stamps before it, the rest of a message after."""
EDGE = 1 << 14
"""Bytes at the beginning and end of a file that are always examined: prefixes, sizes, the end."""
MAX_LINE = 1 << 16
"""Maximum bytes of a line that are kept; a longer line is counted as cut."""
MAX_FILES = 20_000
Finder: TypeAlias = "Callable[[bytes], Sequence[int]]"
"""Returns ascending offsets in a block of whole lines, at least one in each that may match."""
_SKIPPED = (".pt", ".pth", ".bin", ".safetensors", ".so", ".py", ".pyc", ".png", ".whl", ".npy")
_PIPES = ("/dev/stdin", "/dev/fd/")
_TEXT = bytes((0, *b"\a\b\t\n\v\f\r\x1b", *range(0x20, 0x7F), *range(0x80, 0x100)))
"""What text in any encoding consists of, what a terminal obeys, and the zeros of a file that was
truncated or not written out.
"""
_MESSAGES = ("log", "MESSAGE", "message", "msg", "line")
_TIMES = ("time", "timestamp", "@timestamp", "ts", "__REALTIME_TIMESTAMP")
_HOSTS = ("_HOSTNAME", "hostname", "host", "node")
_RANKS = ("rank", "global_rank", "RANK")
_REASONS = ("error", "err", "reason", "exception", "exc_info", "stacktrace", "stack")
"""Where loggers put what a message is about."""
_KEYS = tuple(f'"{name}"' for name in _MESSAGES)
_MICROSECONDS, _MILLISECONDS = 1e14, 1e11
"""Numbers above these are microseconds and milliseconds since 1970: seconds are never so large."""


class InputError(Exception):
    """A log cannot be read; the message says which and why."""


@dataclass(slots=True)
class Statistics:
    """How much was read, and how much of it could not be used as it is."""

    files: int = 0
    bytes: int = 0
    lines: int = 0
    examined: int = 0
    replaced: int = 0
    """Lines with bytes that are not UTF-8."""
    cut: int = 0
    """Lines longer than MAX_LINE."""
    unfinished: set[str] = field(default_factory=set)
    """Logs whose last line is unfinished."""
    unread: list[str] = field(default_factory=list)
    """Which logs could be read only in part, or are no logs, and why."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A run of lines that were not examined."""

    lines: int
    is_progress: bool
    has_loss: bool


class Raw(NamedTuple):
    """A line to examine; several share a number if a progress bar redrew the line."""

    number: int
    text: str


def expand(names: Sequence[str], refused: Callable[[OSError], object] | None = None) -> list[str]:
    """Return the log files that match the names, in order; `-` is standard input. `refused` is told
    the folders that cannot be listed.

    InputError: a name matches no file, or there are too many files.
    """
    found: dict[str, None] = {}
    for name in names:
        if name == "-":
            found[name] = None
        elif os.path.isdir(name):
            for folder, folders, files in os.walk(name, onerror=refused):
                folders.sort()
                paths = (os.path.join(folder, file) for file in sorted(files))
                found.update(
                    (path, None)
                    for path in paths
                    if not path.endswith(_SKIPPED)
                    and not os.path.islink(path)
                    and os.path.isfile(path)
                )
        elif os.path.exists(name):
            found[name] = None
        elif matches := sorted(glob.glob(name, recursive=True)):
            found.update((match, None) for match in matches if not os.path.isdir(match))
        else:
            raise InputError(f"{name}: {_absence(name)}")
        if len(found) > MAX_FILES:
            raise InputError(f"more than {MAX_FILES:,} files")
    return list(found)


def _absence(name: str) -> str:
    """Return why there is no file of this name."""
    try:
        os.stat(name)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            return error.strerror or str(error)  # such as a folder above it that is closed
    return "no such file"


def open_file(name: str) -> IO[bytes]:
    """Open a regular file for reading, or a pipe that a shell has put in `/dev/fd`.

    OSError, also for a FIFO or a device, which a user may have put among the logs.
    """
    if name.startswith(_PIPES):
        return open(name, "rb")
    return open(regular_files.open_named(name), "rb")


def open_log(name: str, closing: contextlib.ExitStack) -> IO[bytes]:
    """Open a log until `closing` ends, decompressing it by its first bytes, not by its name.

    InputError: it cannot be opened, or its compression is not supported here.
    """
    try:
        buffered = cast("io.BufferedReader", sys.stdin.buffer)
        if name != "-":
            buffered = cast("io.BufferedReader", closing.enter_context(open_file(name)))
        magic = buffered.peek()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from error
    if magic.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.open(buffered))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return lzma.open(buffered)
    if magic.startswith(b"BZh"):
        return bz2.open(buffered)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        message = f"{name}: is compressed with zstd; use `zstdcat LOG | dshealthd explain -`"
        raise InputError(message)
    return buffered


class Examiner:
    """Selector of the lines in one log that are near a possible match."""

    def __init__(self, find: Finder, statistics: Statistics) -> None:
        """Begin a log, whose first lines are always examined."""
        self._find = find
        self._statistics = statistics
        self._number = 0
        self._until = EDGE

    def take(self, block: bytes, *, is_last: bool = False) -> Iterator[Raw | Skipped]:
        """Yield the lines of the log's next block; the end of the last block is always examined."""
        before = self._number
        windows = _windows(block, self._find(block), self._until, is_last=is_last)
        self._until = 0
        place = 0
        for start, end in windows:
            if start > place:
                yield self._skip(block, place, start)
            yield from _lines(block[start:end], self._number, self._statistics)
            self._number += block.count(b"\n", start, end)
            place = end
        if place < len(block):
            yield self._skip(block, place, len(block))
        elif windows:
            self._until = AFTER
        self._statistics.lines += self._number - before

    def skip(self) -> Skipped:
        """Return a placeholder for a part of the log that was not read."""
        self._until = EDGE
        return Skipped(0, is_progress=False, has_loss=False)

    def _skip(self, block: bytes, start: int, end: int) -> Skipped:
        lines = block.count(b"\n", start, end)
        self._number += lines
        has_loss = block.find(b"loss", start, end) >= 0
        words = (b"it/s", b"step")
        is_progress = has_loss or any(block.find(word, start, end) >= 0 for word in words)
        return Skipped(lines, is_progress, has_loss)


def read(
    name: str, find: Finder, statistics: Statistics, stream: IO[bytes] | None = None
) -> Iterator[Raw | Skipped]:
    """Read a log and yield the lines near a possible match.

    The first and last lines of a file are always among them. A truncated compressed file is read as
    far as possible.
    """
    statistics.files += 1
    examiner = Examiner(find, statistics)
    with contextlib.ExitStack() as closing:
        file = stream or open_log(name, closing)
        blocks = _blocks(file, statistics, name)
        block = next(blocks, b"")
        if not _is_text(block[:EDGE]):
            statistics.unread.append(f"not text: {name}")
        while block:
            # Read one block ahead, as the end of the last one is always examined.
            following = next(blocks, b"")
            yield from examiner.take(block, is_last=not following)
            block = following


def _is_text(beginning: bytes) -> bool:
    """Return whether at least half of it is lines of text, as a few odd bytes hide nothing."""
    lines = beginning.split(b"\n")
    odd = [line for line in lines if line.translate(None, _TEXT)]
    return sum(map(len, odd)) <= sum(map(len, lines)) / 2


def _windows(
    block: bytes, offsets: Sequence[int], until: int, *, is_last: bool
) -> list[tuple[int, int]]:
    """Return the parts of a block, in whole lines, to examine."""
    found: list[tuple[int, int]] = []

    def add(start: int, end: int) -> None:
        if found and start <= found[-1][1]:
            start, _ = found.pop()
        found.append((start, end))

    if until:
        add(0, _line_end(block, min(until, len(block))))
    for offset in offsets:
        if found and offset + (AFTER >> 1) < found[-1][1]:
            continue  # well inside
        end = _line_end(block, offset + AFTER)
        start = block.rfind(b"\n", 0, max(0, offset - BEFORE)) + 1
        add(min(start, block.rfind(b"\n", 0, offset) + 1), end)
    if is_last:
        add(block.rfind(b"\n", 0, max(0, len(block) - EDGE)) + 1, len(block))
    return found


def _line_end(block: bytes, offset: int) -> int:
    return block.find(b"\n", offset) + 1 or len(block)


def _blocks(file: IO[bytes], statistics: Statistics, name: str) -> Iterator[bytes]:
    """Yield blocks of whole lines; a line longer than a block is cut to its beginning."""
    rest = b""
    cutting = False
    is_empty = True
    take = file.read if isinstance(file, io.BufferedReader) else getattr(file, "read1", file.read)
    while True:
        try:
            data = take(BLOCK)  # `read1`: on a truncated stream, `read` would return nothing
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = f"{name}: {getattr(error, 'strerror', None) or error}"
            if is_empty:
                raise InputError(reason) from error
            statistics.unread.append(f"not read to its end: {reason}")  # MAX_FILES bounds them
            data = b""
        if not data:
            break
        statistics.bytes += len(data)
        is_empty = False
        if cutting:
            place = data.find(b"\n")
            if place < 0:
                continue
            data, cutting = data[place:], False
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        # Bounded: a file without a line end, such as a core dump, must not be read into memory
        # completely.
        elif len(rest) + len(data) > BLOCK:
            rest = (rest + data)[:MAX_LINE]
            statistics.cut += 1
            cutting = True
        else:
            rest += data
    if rest:
        statistics.unfinished.add(name)  # MAX_FILES bounds them
        yield rest + b"\n"


def _lines(segment: bytes, number: int, statistics: Statistics) -> Iterator[Raw]:
    for offset, line in enumerate(
        segment.splitlines() if b"\r" not in segment else segment[:-1].split(b"\n"), 1
    ):
        statistics.examined += 1
        if len(line) > MAX_LINE:
            statistics.cut += 1
            line = line[:MAX_LINE]  # noqa: PLW2901 - shortened in place
        text = line.decode("utf-8", "replace")
        if "\ufffd" in text:
            statistics.replaced += 1
        if "\0" in text:
            text = text.replace("\0", "")
        if "\r" in text:
            for part in text.split("\r"):
                if part.strip():
                    yield Raw(number + offset, part)
        else:
            yield Raw(number + offset, text)


def _record(text: str) -> dict[str, Any] | None:
    """Return a JSON log record; None if it is truncated, or a dictionary that a program printed."""
    if not text.startswith("{") or not any(key in text for key in _KEYS):
        return None
    try:
        record = json.loads(text)
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _message(record: dict[str, Any]) -> Any:
    return next((record[name] for name in _MESSAGES if name in record), None)


def lines(text: str) -> list[str]:
    """Return a JSON log record's message as lines; the line itself if it is not a record."""
    if (record := _record(text)) is None:
        return [text]
    message = _message(record)
    if isinstance(message, str) and (inner := _record(message)) is not None:
        # A collector's record of the one that a logger has written.
        record, message = record | inner, _message(inner)
    if isinstance(message, dict) and isinstance(error := message.get("extraInfo"), dict):
        message = error.get("py_callstack")  # torchrun's error file
    if isinstance(message, list):  # journald's form of a message that is not UTF-8
        if not all(isinstance(value, int) and value in range(256) for value in message):
            return [text]
        message = bytes(message).decode("utf-8", "replace")
    if not isinstance(message, str):
        return [text]
    message = ANSI.sub("", message)
    when = _time(next((record[name] for name in _TIMES if name in record), None))
    where = dict(record)
    for inner in (record.get("kubernetes"), record.get("labels")):  # as Fluent Bit and Loki add
        where |= inner if isinstance(inner, dict) else {}
    host = next((where[name] for name in _HOSTS if name in where), None)
    prefix = f"{when} " if when else ""
    if when and isinstance(host, str) and host.replace("-", "").replace(".", "").isalnum():
        prefix += f"{host} json: "
    rank = next((where[name] for name in _RANKS if name in where), None)
    if str(rank).isdecimal():
        prefix += f"[rank{rank}]: "
    said = [message.rstrip("\n"), *(str(record[name]) for name in _REASONS if record.get(name))]
    text = f"{said[0]}: {said[1]}" if len(said) > 1 and "\n" not in said[1] else "\n".join(said[:2])
    return [prefix + line for line in "\n".join([text, *said[2:]]).split("\n")]


def _time(value: Any) -> str | None:
    """Return a JSON record's time as ISO 8601 in UTC; None if its format is unknown."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        try:
            when = datetime.fromisoformat(value)
            # Near year 1 or 9999, no datetime of another time zone has that moment.
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
        except (ValueError, ArithmeticError):
            return None
    try:
        seconds = float(value)
        seconds /= 1e6 if seconds > _MICROSECONDS else 1e3 if seconds > _MILLISECONDS else 1
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (TypeError, ValueError, ArithmeticError, OSError):
        return None
