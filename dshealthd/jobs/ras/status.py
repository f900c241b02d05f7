"""The status that NCCL's RAS tells of a job: communicators, missing ranks, operations launched.

RAS is a thread in every process of an NCCL job (2.24 and later). Asked over TCP, it collects from
all processes of the job and answers in JSON (`ras_json`, from 2.28.7) or in text (`ras_text`). The
text form leaves out what is in order: counts that agree are not in it.

Counts are of operations *launched*: a job whose GPUs hang in an operation that all ranks have
launched reads as if nothing were wrong. Source: `src/ras/client_support.cc` of NCCL 2.24 to 2.30.
"""

from __future__ import annotations

import enum
import functools
import heapq
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAMED = 8
"""Ranks of one communicator that are named one by one: of those behind, and of those in trouble."""
OPERATIONS = frozenset({"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"})
OTHER = "other"
"""Stands for operations and errors that this version does not know, so that labels stay bounded
whatever answers.
"""
ANY = "any"
"""Stands for all operations together: NCCL 2.24 and 2.25 do not tell them apart."""
REMOTE_ERROR = "remote_error"
"""A rank whose connection to another one broke: it waits for that one, and is not the cause."""
ERRORS = {
    1: "unhandled_cuda_error",
    2: "system_error",
    3: "internal_error",
    4: "invalid_argument",
    5: "invalid_usage",
    6: REMOTE_ERROR,
    8: "timeout",
}
"""Results of NCCL that are errors, by number (`nccl.h`); 0 is success and 7 is "in progress"."""


_VERSION = re.compile(r"[0-9]+\.[0-9]+[0-9A-Za-z.+-]{0,32}")


class MalformedAnswer(ValueError):
    """RAS answered with something that is not understood; the message says what, and where."""


class ImpossibleAnswer(MalformedAnswer):
    """An answer that is well-formed and cannot be true; the message says why."""


class RasRankState(enum.StrEnum):
    """What a rank does in a communicator, by the rules of NCCL's own summary."""

    INIT = "init"
    RUNNING = "running"
    FINALIZE = "finalize"
    ABORT = "abort"
    NOT_MEMBER = "not_member"
    """Its process answered, but knows nothing of the communicator: not yet, or no longer."""
    UNRESPONSIVE = "unresponsive"
    """Its process gave no answer."""
    DEAD = "dead"
    """Its process could not be reached for a minute, and is given up."""


class RankLocation(NamedTuple):
    """Where a rank runs."""

    host: str
    """IP address of its node on NCCL's bootstrap network; empty if it is not told."""
    pid: int
    """As its own namespace numbers it; -1 if it is not told."""
    gpu: int
    """NVML's index."""


class Lag(NamedTuple):
    """A rank that has launched fewer operations than the one that is furthest."""

    rank: int
    """Number within its communicator."""
    operation: str
    behind: int
    place: RankLocation | None


class Trouble(NamedTuple):
    """A rank that did not answer for its communicator, or that has an error."""

    rank: int
    """Number within its communicator."""
    what: str
    """`dead`, `unresponsive`, or the name of an error."""
    place: RankLocation | None


class Spread(NamedTuple):
    """How many operations of one kind the ranks of a communicator have launched."""

    least: int
    most: int

    @property
    def width(self) -> int:
        """By how many operations the last rank of a communicator is behind the first."""
        return self.most - self.least


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One communicator, or several that are alike in all that is told of them."""

    name: str
    """Its hash, in hexadecimal digits, and in JSON the second one that makes it unique.

    Empty where the text form does not name it.
    """
    size: int
    """Ranks that it is made of, whether they answer or not."""
    states: Mapping[RasRankState, int]
    """How many ranks are in each state."""
    operations: Mapping[str, Spread] = field(default_factory=dict)
    """Counts by operation; empty where they are not told."""
    marks: Mapping[object, int] = field(default_factory=dict)
    """Counts to compare with those of the next answer.

    By rank in JSON, of what is listed in text.
    """
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How many ranks have an error, by kind (init, async) and error."""
    behind: tuple[Lag, ...] = ()
    """The furthest behind first, at most `MAX_NAMED`."""
    unclear: frozenset[str] = frozenset()
    """Operations in which ranks are behind that text does not name.

    `behind` has none ahead of them.
    """
    troubles: tuple[Trouble, ...] = ()
    """The dead first, then those with errors, then the unresponsive; at most `MAX_NAMED`."""
    alike: int = 1
    """How many communicators this is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One answer."""

    version: str
    """Of NCCL, such as 2.28.9."""
    communicators: tuple[Communicator, ...]
    timeouts: int | None
    """Links of RAS's own network that timed out while it collected; None if it is not told."""
    processes: Mapping[RasRankState, int]
    """How many processes are unresponsive, and how many dead."""
    ranks: Mapping[RankLocation, int] = field(default_factory=dict)
    """Numbers of the ranks in the largest communicator, by place; empty in text."""


@functools.lru_cache(maxsize=4096)
def address(text: str) -> str:
    """Return an IP address of a rank in the RAS status as it is usually written.

    Nothing for what is none, so that it is safe as a label.
    """
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def version(text: str) -> str:
    """Return the version of NCCL that `text` of a RAS status writes; nothing if it writes none."""
    return text if _VERSION.fullmatch(text) else ""


def error_name(code: int) -> str | None:
    """Return what a result of NCCL in a RAS status is called if it is an error."""
    return None if code in {0, 7} else ERRORS.get(code, OTHER)


def severity(what: str) -> int:
    """Return the order of a RAS status's troubles: a dead process is more certain than an error,
    and an error more than silence; what another rank has brought about comes last.
    """
    order = {RasRankState.DEAD.value: 0, RasRankState.UNRESPONSIVE.value: 2, REMOTE_ERROR: 3}
    return order.get(what, 1)


def first_troubles(troubles: Iterable[Trouble]) -> tuple[Trouble, ...]:
    """Return the worst troubles of a RAS status."""
    return tuple(
        heapq.nsmallest(
            MAX_NAMED,
            troubles,
            key=lambda trouble: (severity(trouble.what), trouble.rank, trouble.what),
        )
    )


def first_lags(lags: Iterable[Lag]) -> tuple[Lag, ...]:
    """Return the ranks of a RAS status that lag furthest behind."""
    return tuple(
        heapq.nsmallest(MAX_NAMED, lags, key=lambda lag: (-lag.behind, lag.rank, lag.operation))
    )
