"""Events of logs: what is found, where it stands, whose it is, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_QUOTE = 300
"""Characters of a line that are quoted."""

LAYERS = ("hardware", "scheduler", "program", "communication", "launcher")
"""What fails underneath what: a fault of a layer shows in the layers after it."""


@dataclass(frozen=True, slots=True)
class Place:
    """One line of one file: the proof of a claim."""

    file: str
    line: int
    quote: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose a line is, as far as the line and its file tell; None is unknown."""

    source: int = 0
    rank: int | None = None
    local: int | None = None
    """Rank within the node, as torchrun's `[default3]:`."""
    task: int | None = None
    """Task of `srun -l`, which is a rank or, where each task is a launcher, a node."""
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None

    @property
    def labelled(self) -> bool:
        """Whether the line of the event belongs to one rank for certain."""
        return self.rank is not None or self.local is not None or self.pid is not None


@dataclass(frozen=True, slots=True)
class Stamp:
    """A time as it is written: its form, and the text."""

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
    """One thing that a log says."""

    slug: str
    pattern: str
    """`slug/name` of the pattern, or `child-failed/python`."""
    role: str
    layer: str
    says: str
    place: Place
    origin: Origin
    order: int
    """Position among all lines read; in time only within one file."""
    stamp: Stamp | None = None
    exact: bool = False
    """The stamp stands in its own line, not in one before it."""
    time: float | None = None
    weak: bool = False
    """A guess that any other explanation beats."""
    first: bool = False
    """Nothing of its layer comes before it: it is no consequence of a peer that died."""
    bare: bool = False
    """An exception without its traceback."""
    fields: Mapping[str, str] = field(default_factory=dict)
    frames: tuple[Frame, ...] = ()
    count: int = 1
    last: Place | None = None
    """Where it was said the last time, if more than once."""
    progress: int = 0
    """Lines of progress before it, in its file."""
    attempt: int = 0
    """Which start of the job within its file."""
    rank: int | None = None
    """The rank in the whole job, once `causality` has worked it out."""
    host: str | None = None

    @property
    def own_frame(self) -> Frame | None:
        """Return the event's innermost frame that is not a library's."""
        for frame in reversed(self.frames):
            if not any(part in frame.file for part in LIBRARIES):
                return frame
        return None


LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "/bin/torchrun")
