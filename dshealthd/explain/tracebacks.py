"""What takes several lines of a stream: Python tracebacks, and torchrun's summary of failed
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dshealthd.explain.events import Frame, Place, Stamp
from dshealthd.explain.facts import MAX_FAILURES, Bounded, Failure, Recognized
from dshealthd.explain.names import short
from dshealthd.explain.streams import HEAD, Line

MAX_MESSAGE_LINES = 16
MAX_MESSAGE = 4000
"""Maximum characters kept of a message; DeepSpeed prints whole configurations."""
MAX_FRAMES = 200
MAX_OPEN = 64
"""Maximum open tracebacks in a stream; more ranks do not fail within one screen of lines."""
MAX_STREAMS = 4096
MAX_HEAD = 400
"""Maximum length of a line in which `Traceback` opens one: some loggers put a record before it."""
_IGNORED = "Exception ignored in"
"""What Python prints before an exception that ends nothing, as in a destructor."""
_FRAME = re.compile(r'\s+File "([^"\n]{1,400})", line (\d{1,9})(?:, in (.{1,200}))?')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]{0,200}(?::(?: |$)|$)")
_BARE = re.compile(
    r"(?:[A-Za-z_]\w*\.){0,12}(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit)"
    r"|OSError|Exception)(?:: .*|:?$)"
)
_OTHERWISE = re.compile(
    r'\s*"message": "([\w.]{0,80}(?:Error|Exception)(?:: .{0,1000})?)",?$'  # torchrun's JSON
    r"|\s*what\(\):\s{1,8}(?P<cpp>\S.*)"  # C++, of what nobody caught, before it aborts
    r"|Uncaught (?P<hook>[\w.]{1,120}(?:Error|Exception): .*)"
)
"""An exception as others than Python's own traceback write it."""
_FIELD = re.compile(r"[\w.\[\]'-]{1,80}")
_LINKS = ("During handling of the above", "The above exception was the direct")
_CONTINUES = re.compile(
    r"\s+\S|Last error|nccl[A-Z]|GPU device may|Search for `cuda|CUDA kernel err|For "
    r"debugging|Compile with"
)
_SUMMARIES = ("Failures:", "Root Cause (first observed failure)")
_SUMMARY = re.compile(r"\s+(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)")
_SUMMARY_ENTRY = re.compile(r"\[\d+\]:\s*$")
_SUMMARY_RANK = re.compile(r"(\d{1,9}) \(local_rank: (\d{1,9})\)")
_SUMMARY_EXIT = re.compile(r"(-?\d{1,9}) +\(pid: (\d{1,10})\)")


def as_exception(line: Line) -> Line:
    """Return a line with an exception in another format as the last line of a traceback."""
    text = line.text
    if not ('"message"' in text or "what():" in text or text.startswith("Uncaught ")):
        return line
    match = _OTHERWISE.match(text)
    if match is None:
        return line
    found = f"UncaughtException: {match['cpp']}" if match["cpp"] else match[1] or match["hook"]
    return line._replace(text=found, prefixed=False, shape=None)


def begins(line: Line) -> bool:
    """Return whether a line begins a traceback, an exception or a launcher's summary, or says what
    the next one is.
    """
    text = line.text
    return (
        HEAD in text
        or text.startswith((_IGNORED, *_LINKS, *_SUMMARIES, "  F"))
        or (not line.prefixed and _BARE.fullmatch(text) is not None)
    )


@dataclass(slots=True)
class Traceback:
    """One exception: its frames and its message."""

    place: Place
    """The exception's own line once known, the `Traceback` line before that."""
    line: Line
    frames: list[Frame] = field(default_factory=list)
    code: str = ""
    """The program's line that raised it."""
    message: list[str] = field(default_factory=list)
    chained: bool = False
    """It was raised while handling the previous one in its stream, or because of it."""
    bare: bool = False
    """Only its last line was found."""
    ignored: bool = False
    """Python says that it ignored it."""
    head: str = ""
    """The line that it begins with, as it is in the file."""
    stamp: Stamp | None = None
    of_kernel: bool = False
    order: int = 0
    """Position of its last line among all lines; more may have been read since."""
    progress: int = 0
    """Lines of progress before it."""

    @property
    def text(self) -> str:
        """Class and message of the exception."""
        return "\n".join(self.message)[:MAX_MESSAGE]

    @property
    def stack(self) -> str:
        """The frames as `FILE:FUNCTION` lines, outermost first."""
        return "\n".join(f"{frame.file}:{frame.function}" for frame in self.frames)


class Assembler:
    """Assembler of the tracebacks in one file."""

    def __init__(self, place: Callable[[Traceback], object]) -> None:
        """Make an assembler that calls `place` where an exception stands."""
        self._place = place
        self._open: dict[object, list[Traceback]] = Bounded(MAX_STREAMS)
        self._closing: dict[object, Traceback] = {}
        self._chained: dict[object, bool] = Bounded(MAX_STREAMS)
        self._ignored: set[object] = set()
        """Streams whose last line says that the next exception was ignored."""
        self._headless: Place | None = None

    def expects(self, key: object) -> bool:
        """Return whether the next line of a stream may belong to a traceback, whatever it says."""
        return key in self._open or key in self._closing or key in self._ignored

    def feed(self, line: Line, place: Place) -> tuple[bool, list[Traceback]]:
        """Add a line; return whether it belongs to a traceback, and the tracebacks it completes."""
        key, text = line.origin, line.text
        ignored = key in self._ignored
        if ignored:
            self._ignored.remove(key)
        elif text.startswith(_IGNORED) and len(self._ignored) < MAX_STREAMS:
            self._ignored.add(key)
        if HEAD in text and len(text) < MAX_HEAD:
            done = self._finish(key)
            if text.partition(HEAD)[0].strip().istitle():
                done = []  # `Original Traceback`: what the exception before it wraps
            opened = self._open.setdefault(key, [])
            if len(opened) < MAX_OPEN:
                chained = self._chained.pop(key, False)
                opened.append(
                    Traceback(place, line, chained=chained, ignored=ignored, head=place.quote)
                )
            return True, done
        opened = self._open.get(key, [])
        if closing := self._closing.get(key):
            if text.startswith(_LINKS):
                self._chained[key] = True
                return True, self._finish(key)
            if self._continues(closing, line, opened):
                closing.message.append(text)
                return True, []
            done = self._finish(key)
            consumed, more = self._frame(key, line, place)
            return consumed, done + more
        if text.startswith(_LINKS):
            self._chained[key] = True
            return True, []
        return self._frame(key, line, place)

    def feed_bare(self, line: Line, place: Place) -> list[Traceback]:
        """Add a line that is an exception; return the tracebacks that it completes."""
        done = self._finish(line.origin)
        bare = Traceback(place, line, message=[line.text], bare=True)
        return done + self._close(line.origin, bare)

    def _frame(self, key: object, line: Line, place: Place) -> tuple[bool, list[Traceback]]:
        opened = self._open.get(key, [])
        text = line.text
        if opened:
            current = opened[-1]
            if text[:1] in {" ", "\t"}:
                if match := _FRAME.match(text):
                    if len(current.frames) < MAX_FRAMES:
                        function = (match[3] or "?").strip()
                        current.frames.append(Frame(match[1], int(match[2]), function))
                    return True, []
                current.code = text.strip(" \t^~") or current.code
                return len(current.frames) > 0, []
            if (
                (current.line.prefixed or not line.prefixed)
                and _EXCEPTION.match(text)
                and (current.frames or _BARE.fullmatch(text))
            ):
                opened.pop()
                if not opened:
                    del self._open[key]
                # Without a message of its own, what was asserted says most.
                is_bare = current.code.startswith("assert ") and text.rstrip(":").isidentifier()
                current.place = place
                current.message = [f"{text}: {current.code}" if is_bare else text]
                return True, self._close(key, current)
            return False, []
        if text[:3] == "  F" and _FRAME.match(text):
            self._headless = place
        elif not line.prefixed and _BARE.fullmatch(text):
            self._headless = None
            chained = self._chained.pop(key, False)
            bare = Traceback(place, line, message=[text], bare=True, chained=chained)
            return True, self._close(key, bare)
        return False, []

    def _close(self, key: object, traceback: Traceback) -> list[Traceback]:
        """Keep a traceback to which more lines may belong; return those that must make room."""
        self._place(traceback)
        self._closing[key] = traceback
        if len(self._closing) <= MAX_STREAMS:
            return []
        return self._finish(next(iter(self._closing)))

    @staticmethod
    def _continues(closing: Traceback, line: Line, opened: list[Traceback]) -> bool:
        """Return whether a line continues the message of the traceback before it."""
        is_logged = closing.line.prefixed
        """Whether a logger stamps every line of it and the lines after it."""
        if line.prefixed != is_logged or len(closing.message) >= MAX_MESSAGE_LINES:
            return False
        if line.text.startswith(_IGNORED):
            return False
        # pydantic names each field on a line of its own, without a blank before it.
        if "validation error" in closing.message[0] and _FIELD.fullmatch(line.text):
            return True
        if closing.message[-1].rstrip().endswith((":", ",")) and line.text.strip():
            return not _FRAME.match(line.text)
        if opened or is_logged or not line.origin.labeled:
            return _CONTINUES.match(line.text) is not None and not _FRAME.match(line.text)
        return bool(line.text.strip()) and not _BARE.fullmatch(line.text)

    def _finish(self, key: object) -> list[Traceback]:
        found = self._closing.pop(key, None)
        return [] if found is None else [found]

    @property
    def unfinished(self) -> Place | None:
        """Where the last traceback begins that has no exception yet, or frames without a head.

        None if all tracebacks are whole.
        """
        places = [opened[-1].place for opened in self._open.values() if opened]
        if self._headless is not None:
            places.append(self._headless)
        return max(places, key=lambda place: place.line, default=None)

    def finish(self) -> Iterator[Traceback]:
        """Yield the tracebacks that are complete except for a line that shows their end."""
        yield from self._closing.values()
        self._closing.clear()


class LauncherSummary:
    """Reader of the summaries in one file, which follow `ChildFailedError`."""

    def __init__(self, found: Recognized, source: int) -> None:
        self._found = found
        self._source = source
        self._facts = found.sources[source]
        self._failure: Failure | None = None

    @property
    def is_open(self) -> bool:
        """Whether the lines of a summary follow."""
        return self._failure is not None

    def take(self, line: Line, place: Place) -> bool:
        """Read a line; return whether it belongs to torchrun's summary."""
        text = line.text
        self._facts.open_summaries += text.startswith("Failures:")
        if text.startswith("Root Cause (first observed failure)"):
            self._failure = Failure(place, self._source, line.origin.task, root=True)
            return True
        if self._failure is None:
            if text.startswith("Failures:"):
                self._failure = Failure(place, self._source, line.origin.task)
                return True
            return False
        if text.startswith("====="):
            self._failure = None
            return True
        if text.startswith("-----"):
            return True
        if _SUMMARY_ENTRY.match(text):
            if self._failure.rank is not None:
                self._failure = Failure(
                    place, self._source, line.origin.task, root=self._failure.root
                )
            return True
        match = _SUMMARY.match(text)
        if match is None:
            return False
        failure, value = self._failure, match[2]
        if match[1] == "time":
            failure.time = value.strip()
        elif match[1] == "host":
            failure.host = value.strip(' ",')
        elif match[1] == "rank" and (ranks := _SUMMARY_RANK.match(value)):
            failure.rank, failure.local = int(ranks[1]), int(ranks[2])
        elif match[1] == "exitcode" and (exits := _SUMMARY_EXIT.match(value)):
            failure.exit, failure.pid = int(exits[1]), int(exits[2])
            failure.place = place
            self._facts.open_summaries -= failure.root  # it comes last
            if len(self._found.failures) < MAX_FAILURES:
                self._found.failures.append(failure)
            if failure.rank is not None:
                host = failure.host and short(failure.host)
                for name in {host, None}:  # its lines may not name the host
                    key = self._source, name, failure.pid
                    self._found.ranks_by_pid[key] = MAX_FAILURES, failure.rank
                self._found.see(failure.rank)
        return True
