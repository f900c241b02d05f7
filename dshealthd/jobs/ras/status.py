"""The status that NCCL's RAS reports of a job: communicators, missing ranks, operations launched.

RAS is a thread in every process of an NCCL job (2.24 and later). On a query over TCP, it collects
from all processes of the job and answers in JSON (`from_json`, since 2.28.7) or in text, which
crashes most releases and omits what is in order: it is not read.

Counts are of operations *launched*: a job whose GPUs hang in an operation that all ranks have
launched looks healthy. Source: `src/ras/client_support.cc` of NCCL 2.28 to 2.32.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

OPERATIONS = frozenset({"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"})
OTHER = "other"
"""Stands for unknown operations and errors, so that labels stay bounded whatever answers."""
REMOTE_ERROR = "remote_error"
"""A rank whose connection to another one broke: it waits for that one, and is not the culprit."""
ERRORS = {
    1: "unhandled_cuda_error",
    2: "system_error",
    3: "internal_error",
    4: "invalid_argument",
    5: "invalid_usage",
    6: REMOTE_ERROR,
    8: "timeout",
}
"""NCCL results that are errors, by number (`nccl.h`); 0 is success and 7 is "in progress"."""


class MalformedAnswer(ValueError):
    """An answer that is not understood; the message says what is wrong, and where."""


class ImpossibleAnswer(MalformedAnswer):
    """An answer that is well-formed but cannot be true; the message says why."""


class RasRankState(enum.StrEnum):
    """The state of a rank in a communicator, by the rules of NCCL's own summary."""

    INIT = "init"
    RUNNING = "running"
    FINALIZE = "finalize"
    ABORT = "abort"
    NOT_MEMBER = "not_member"
    """Its process answered, but does not know the communicator: not yet, or no longer."""
    UNRESPONSIVE = "unresponsive"
    """Its process did not answer."""
    DEAD = "dead"
    """Its process was unreachable for a minute, and RAS has given it up."""


class RankLocation(NamedTuple):
    """Where a rank runs."""

    host: str
    """IP address of its node on NCCL's bootstrap network; empty if unknown."""
    pid: int
    """Pid in its own namespace; -1 if unknown."""
    gpu: int
    """NVML's index."""


class Lag(NamedTuple):
    """A rank that has launched fewer operations than the furthest one."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One communicator in a RAS answer."""

    name: str
    """Its hash in hexadecimal digits, and the second hash, which makes it unique."""
    size: int
    """Number of its ranks, whether they answer or not."""
    states: Mapping[RasRankState, int]
    """Number of ranks in each state."""
    marks: Mapping[int, int] = field(default_factory=dict)
    """Counts by rank, to compare with those of the next answer."""
    behind: tuple[Lag, ...] = ()
    """Lagging ranks."""
    troubles: tuple[Trouble, ...] = ()
    """Ranks that are dead, unresponsive, or have an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What one RAS answer says of a job."""

    version: str
    """NCCL version, such as 2.28.9."""
    communicators: tuple[Communicator, ...]
    ranks: Mapping[RankLocation, int] = field(default_factory=dict)
    """Numbers of the ranks in the largest communicator, by place."""


@functools.lru_cache(maxsize=4096)
def canonical_address(text: str) -> str:
    """Return an IP address in canonical form, safe as a label; empty if it is not an address."""
    try:
        return str(ipaddress.ip_address(text))
    except (ValueError, ArithmeticError):
        return ""


def error_name(code: int) -> str | None:
    """Return the name of an NCCL result if it is an error; otherwise None."""
    return None if code in {0, 7} else ERRORS.get(code, OTHER)
