"""The facts from all logs together: events, failures, and which rank is which."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from dshealthd.explain import input as logs
from dshealthd.explain import names
from dshealthd.explain.events import Event, Origin, Place, Stamp
from dshealthd.explain.ledger import Ledger
from dshealthd.explain.statements import Statements

if TYPE_CHECKING:
    from dshealthd.explain.streams import Line

K = TypeVar("K")
V = TypeVar("V")
_WORLD = re.compile(
    r"(?:\bworld[_ ]?size\W{1,4}|\bprocess_count=|\bdist_world_size=|\bnranks "
    r"|\bWORLD_SIZE\W{1,3})(\d{1,6})\b"
)
_OWN_RANK = re.compile(r"\[(?:rank|Rank|RANK)[ :]?(\d{1,6})\]")
"""A rank that a process puts before its lines."""
_OF_WORLD = re.compile(
    r"(?<![\w-])(?<!parallel )(?<!local )(?<!node )(?<!group )(?<![DTPE]P )(?:global_)?"
    r"(?i:rank)\W{1,3}(?P<rank>\d{1,6})"
    r"(?:/| of |[^\n]{0,40}?\b(?:nranks|(?i:world)(?:[_ ](?i:size))?)\W{1,3})(?P<world>\d{1,6})\b"
)
"""What a process says of itself: its rank, beside the number of ranks."""

MAX_KNOWN = 100_000
"""Maximum number of ranks, processes and tasks that are remembered."""
MAX_STREAMS = 10_000
"""Maximum number of streams in a file whose last stamp is remembered."""
MAX_HEADINGS = 1000
"""Maximum number of headings of a file that are remembered: the last ones."""
MAX_FAILURES = 10_000
SEVERAL = 3
"""Number of ranks that suffices to show that there are several."""


class Bounded(dict[K, V]):
    """A dictionary that ignores new keys once it is full: logs may hold any number of names."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if key in self or len(self) < self._most:
            super().__setitem__(key, value)

    def setdefault(self, key: K, default: V) -> V:
        """Return the existing value, or the default, which is kept if there is room."""
        if key not in self and len(self) >= self._most:
            return default
        return super().setdefault(key, default)


def _add(found: dict[K, set[int]], key: K, value: int) -> None:
    """Add a value to those of a key, up to as many as show that there are several."""
    values = found.setdefault(key, set())
    if len(values) < SEVERAL:
        values.add(value)


@dataclass(slots=True)
class Failure:
    """One entry of torchrun's summary: a rank that failed, as its launcher saw it."""

    place: Place
    source: int
    task: int | None = None
    root: bool = False
    rank: int | None = None
    local: int | None = None
    host: str | None = None
    time: str = ""
    exit: int | None = None
    pid: int | None = None


@dataclass(slots=True)
class SourceFacts:
    """What one file says besides its events."""

    name: str
    progress: int = 0
    last_stamp: dict[Origin, Stamp] = field(default_factory=lambda: Bounded(MAX_STREAMS))
    final: Stamp | None = None
    """The last stamp in it."""
    dated: Stamp | None = None
    """The last stamp in it that has a year."""
    origins: dict[Origin, None] = field(default_factory=lambda: Bounded(MAX_STREAMS))
    """The origins of its lines."""
    headings: deque[tuple[int, names.Heading]] = field(
        default_factory=lambda: deque(maxlen=MAX_HEADINGS)
    )
    """Where parts of other hosts or processes begin, in order."""
    is_troubled: bool = False
    """Whether a line of a watchdog, a traceback or a launcher's summary has come."""
    lines_before: int = 0
    """Lines before the first such line."""
    progress_before: bool = False
    """Whether any of those lines shows progress."""
    last_step: int | None = None
    """The last step in it."""
    calm: int = 0
    """Healthy lines so far: of level INFO, or that nothing had to be examined in."""
    statements: Statements = field(default_factory=Statements)
    """What its lines say of a failure that no pattern knows."""
    finite: int = 0
    """Order of the last line with a finite loss."""
    alive: int = 0
    """Order of the last line that shows NCCL or the training at work."""
    finished: int = 0
    """Order of the last line that says that the training has ended well."""
    finished_progress: int = 0
    """Lines of progress up to that line."""
    is_plain: bool = False
    """Whether the job at work is shown by lines without syslog's host and tag."""
    finished_at: Stamp | None = None
    """The last stamp up to that line."""
    open_summaries: int = 0
    """Launchers' summaries that begin in it, less those that end in it."""
    is_cut: bool = False
    """Whether it ends within a line."""
    unfinished: Place | None = None
    """Where a traceback begins whose exception is not in it, with nothing at work after it."""
    is_launcher: bool = False
    """Whether torchrun or DeepSpeed's launcher writes to it: a task of srun is then a node."""

    @property
    def begins_before(self) -> bool:
        """Whether it begins before the failure.

        A first line alone shows nothing unless it shows progress: the rest of a watchdog's line
        after a cut looks like any other line.
        """
        return self.progress_before or self.lines_before > 1

    @property
    def has_part_of_summary(self) -> bool:
        """Whether a launcher's summary lacks its beginning or its end."""
        return self.open_summaries != 0


@dataclass(slots=True)
class Recognized:
    """Everything that was found in all logs."""

    events: list[Event] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    sources: list[SourceFacts] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    ranks_by_pid: dict[tuple[int, str | None, int], tuple[int, int]] = field(
        default_factory=lambda: Bounded(MAX_KNOWN)
    )
    """The number of ranks, and the rank, by source, host and pid."""
    ranks_by_source: dict[int, set[int]] = field(default_factory=lambda: Bounded(MAX_KNOWN))
    """Ranks of which a source's lines say that they are their own."""
    ranks_by_prefix: dict[tuple[int, int], set[int]] = field(
        default_factory=lambda: Bounded(MAX_KNOWN)
    )
    """Ranks by source and pid, as processes put them before their lines; several if one writes for
    others."""
    seats: dict[names.Seat, None] = field(default_factory=lambda: Bounded(MAX_KNOWN))
    """What lines say of where ranks run."""
    nodes: dict[str, str] = field(default_factory=lambda: Bounded(MAX_KNOWN))
    """Nodes by the pods that run on them."""
    ranks_seen: set[int] = field(default_factory=set)
    launchers: dict[tuple[int, int | None], set[int]] = field(
        default_factory=lambda: Bounded(MAX_KNOWN)
    )
    """Pids of torchrun by source and task; with several nodes, each has its own ranks."""
    world: int | None = None
    dropped: int = 0
    """Events beyond MAX_EVENTS."""
    statistics: logs.Statistics = field(default_factory=logs.Statistics)

    def learn(self, line: Line, *, ranks: bool, pairs: bool, launches: bool) -> None:
        """Learn from a line which rank, task, process and host belong together, and the world size.

        `ranks`, `pairs` and `launches` are whether it speaks of ranks, whether it may say what
        belongs together, and whether torchrun speaks.
        """
        origin, text, source = line.origin, line.text, line.origin.source
        facts = self.sources[source]
        if origin not in facts.origins:
            facts.origins[origin] = None
            if origin.rank is not None:
                self.see(origin.rank)
                if origin.pid is not None:
                    _add(self.ranks_by_prefix, (source, origin.pid), origin.rank)
        if origin.local is not None:
            facts.is_launcher = True
        elif line.launcher is not None:
            facts.is_launcher = True
            _add(self.launchers, (source, origin.task), line.launcher)
        if line.stamp is not None:
            facts.last_stamp[origin] = line.stamp
            facts.final = line.stamp
            if line.stamp.form == "iso":
                facts.dated = line.stamp
        if ranks:
            if match := _WORLD.search(text):
                self.world = max(self.world or 0, int(match[1]))
            match = _OF_WORLD.search(text)
            if match and int(match["rank"]) < int(match["world"]) > 1:
                self._introduce(origin, int(match["rank"]), int(match["world"]))
            if origin.pid is not None and (match := _OWN_RANK.match(text)):
                _add(self.ranks_by_prefix, (source, origin.pid), int(match[1]))
        if pairs:
            for seat in names.seats(text, origin, self.rank_of(origin)):
                self.seats[seat] = None
            if on := names.node_of(text):
                self.nodes.setdefault(*on)
        if launches and not ranks:
            facts.is_launcher = True

    def _introduce(self, origin: Origin, rank: int, world: int) -> None:
        """Learn the rank of the process that says it; in a part of the job it has another one."""
        if origin.pid is None:
            _add(self.ranks_by_source, origin.source, rank)
            return
        key = origin.source, origin.host and names.short(origin.host), origin.pid
        if world > self.ranks_by_pid.get(key, (0, 0))[0]:
            self.ranks_by_pid[key] = world, rank

    def rank_of(self, origin: Origin) -> int | None:
        """Return the rank that a line's process has said; None if it has not."""
        if origin.rank is not None or origin.pid is None:
            return origin.rank
        host = origin.host and names.short(origin.host)
        known = self.ranks_by_pid.get((origin.source, host, origin.pid))
        return None if known is None else known[1]

    def see(self, rank: int) -> None:
        """Note that a rank appears in the logs."""
        if len(self.ranks_seen) < MAX_KNOWN:
            self.ranks_seen.add(rank)
