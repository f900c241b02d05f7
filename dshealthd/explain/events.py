"""Events in logs: what was found, where, from whom, and what it means."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_NAMED = 8
"""Maximum number of ranks named in a line."""
MAX_QUOTE = 300
"""Maximum characters quoted from a line."""

_FAULTS = {signal.SIGILL, signal.SIGFPE, signal.SIGSEGV}
"""Signals that an instruction of the process itself raises."""
_EXPLAINED = {*_FAULTS, signal.SIGINT, signal.SIGHUP}
"""Signals whose reason is known: these, a keyboard, and a terminal that was closed."""
_CRASHES = {*_FAULTS, signal.SIGBUS, signal.SIGKILL}
_NUMBERS = {
    name.upper(): one.value
    for one in signal.Signals
    for name in (one.name.removeprefix("SIG"), signal.strsignal(one) or "", str(one.value))
}
"""Signals by their names, by what glibc says of them, and by their numbers."""

LAYERS = ("hardware", "scheduler", "program", "communication", "launcher")
"""Layers in order of cause: a fault in one layer shows in the layers after it."""
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "/bin/", "pydantic/")

_LEVELS_LIKE = re.compile(
    r"\d+(?:[.:]\d+){0,2}|(?:rank|default|epoch|step|iter)[-_]?\d+|(?:GPU|[CDEPT]P|[A-Z]|r)\d{1,3}"
    r"|v\d[\w.]*|[\w.-]*\.(?:py|cc?|cpp|cu|h|so|log|json|out|yaml)(?:[:.]\d+)*"
)
"""Numbers, ranks (also as `r3`, `W3`, `GPU3`, `TP3`), steps, releases and files, at the place of a
host's name."""


class Place(NamedTuple):
    """One line of one file: the proof of a claim."""

    file: str
    line: int
    quote: str


class Origin(NamedTuple):
    """Where a line comes from, as far as the line and its file say; None is unknown."""

    source: int = 0
    rank: int | None = None
    local: int | None = None
    """Rank within the node, from torchrun's `[default3]:`."""
    task: int | None = None
    """Task of `srun -l`: a rank, or a node if each task is a launcher."""
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None

    @property
    def labeled(self) -> bool:
        """Whether the line certainly belongs to one rank."""
        return self.rank is not None or self.local is not None or self.pid is not None


class Stamp(NamedTuple):
    """A timestamp as written: its format and its text."""

    form: str
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback."""

    file: str
    line: int
    function: str


@dataclass(slots=True, kw_only=True)
class Event:
    """One event in a log."""

    slug: str
    pattern: str
    """`slug/name` of the pattern, or `child-failed/python`."""
    role: str
    layer: str
    says: str
    title: str = ""
    """What it is in a few words; empty where the slug's title fits."""
    texts: tuple[str, ...] = ()
    """What its pattern says, to be filled again when values from other lines join it."""
    steps: tuple[str, ...] = ()
    """First steps, as in its pattern."""
    place: Place
    origin: Origin
    order: int
    """Position among all lines read; it orders by time only within one file."""
    stamp: Stamp | None = None
    exact: bool = False
    """Whether the stamp is from its own line, not from an earlier one."""
    time: float | None = None
    weak: bool = False
    """A guess that any other explanation beats."""
    first: bool = False
    """Nothing in its layer comes before it: it does not follow from the death of a peer."""
    bare: bool = False
    """An exception without its traceback."""
    is_hollow: bool = False
    """An exception that only says that something failed."""
    fields: Mapping[str, str] = field(default_factory=dict)
    frames: tuple[Frame, ...] = ()
    count: int = 1
    last: Place | None = None
    """Where it occurred last, if more than once."""
    last_order: int = 0
    """`order` of that place."""
    progress: int = 0
    """Lines of progress before it, in its file."""
    calm: int = 0
    """Healthy lines before it, in its file."""
    of_kernel: bool = False
    """Whether the kernel wrote its line."""
    is_warning: bool = False
    """Whether its line has a level below that of an error."""
    rank: int | None = None
    """The rank in the whole job, once `causality` has worked it out."""
    ranks: tuple[int, ...] = ()
    """All its ranks, if its line names several."""
    host: str | None = None
    is_of_several: bool = False
    """Whether several hosts or pods say the same, so that it is of none of them."""

    def __post_init__(self) -> None:
        """It has occurred once."""
        self.last_order = self.last_order or self.order

    @property
    def signal(self) -> int:
        """The signal that ended its process, by the exit code or by its name; 0 if none did.

        A shell adds 128 to its number.
        """
        code = int(self.fields.get("exit", 0))
        name = self.fields.get("signal", self.fields.get("how", ""))
        if code:
            name = str(-code if code < 0 else code - 128)
        return _NUMBERS.get(name.upper().removeprefix("SIG"), 0)

    @property
    def is_crash(self) -> bool:
        """Whether a signal ended its process that no launcher or watchdog sends in an orderly
        end.
        """
        return self.signal in _CRASHES

    @property
    def is_effect(self) -> bool:
        """Whether it says that a signal ended a process, but neither who sent it nor why.

        A process that says so itself has a stack, and one whose instruction raised it needs none.
        """
        is_told = self.layer == "hardware" or self.pattern == "child-failed/crash"
        is_signal = self.signal > 0 or ("how" in self.fields and "exit" not in self.fields)
        return is_signal and self.signal not in _EXPLAINED and not is_told

    @property
    def is_timeout(self) -> bool:
        """Whether it is a collective that timed out."""
        return self.slug in {"nccl-timeout", "gradient-sync-timeout"}

    @property
    def own_frame(self) -> Frame | None:
        """The innermost frame that is not in a library."""
        for frame in reversed(self.frames):
            if not any(part in frame.file for part in LIBRARIES):
                return frame
        return None

    @property
    def whence(self) -> str:
        """The program's own line that raised it, as the end of a sentence; empty if unknown."""
        own = self.own_frame
        return "" if own is None else f" at {own.file}:{own.line} in {own.function}"


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text for a sentence."""
    shown = ", ".join(map(str, ranks[:MAX_NAMED]))
    if len(ranks) > MAX_NAMED:
        shown += f" and {len(ranks) - MAX_NAMED} more"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def is_name_of_host(word: str) -> bool:
    """Return whether a word can be a host's name or address: no prose, number or file."""
    if _LEVELS_LIKE.fullmatch(word):
        return False
    is_number = re.fullmatch(r"(?:0x)?[0-9a-fA-F]{5,}", word) is not None
    return not is_number and any(character.isdigit() for character in word)
