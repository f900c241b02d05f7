"""The methods of the peer API and the schemas of their messages."""

from __future__ import annotations

import base64
import binascii
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.schema import (
    MAX_EXACT,
    Array,
    Choice,
    Flag,
    Integer,
    Number,
    Plain,
    Record,
    misfit,
)
from dshealthd.probe.members.hostlist import is_name
from dshealthd.probe.observation import MAX_PAIRS, Op, Outcome, RoundKind, Stage, known_reason
from dshealthd.probe.peers.protocol import SLUG
from dshealthd.probe.workers.store import MAX_KEY, MAX_VALUE
from dshealthd.training.message import INSTANT, LONGEST_STEP, MAX_COUNT, SHORTEST_STEP

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RANKS_OF_NODE = 64
MAX_SIZE = 1 << 30
"""Bytes of one collective's payload."""
MAX_PAYLOAD = 48000
"""Bytes of an echo's payload: with base64 and the other fields it fits the largest body."""
MAX_FINDINGS, MAX_JOBS, MAX_SUMMARY_TEXT = 4, 16, 128
"""Most findings and jobs in a node's summary, and characters of each of its texts."""
MAX_WAIT = 20.0
"""Seconds that one operation of the store may wait for its keys."""
EPOCH = Integer(-1)
CLOCK = Number(0, 1e11)
"""Unix time in seconds."""
SECONDS = Number(0, 1e6)
RATIO = Number(0, 1e6)
WAITED = Number(0, 1e10)
"""Seconds that an agent has waited for a CPU since it started."""
MAX_BANDWIDTH = 1e14
"""Bytes per second: fifty times a B200's NVLink bandwidth."""
STEP = Record({"size": Integer(1, MAX_SIZE), "repetitions": Integer(1, 1000)})
RANK_NUMBER = Integer(0, 10**7)
"""The largest jobs have 10^5 ranks."""
PART_SECONDS = Number(INSTANT, LONGEST_STEP)
MAX_OWN_WORK = 16
"""Most of these in a job: four times of four roles."""
MAX_VARIANCE = 1e3
"""Of logarithms of what takes from an instant to the longest step, whose range is 37."""


@dataclass(frozen=True, slots=True)
class NodeName(Plain):
    """A node's name, which is only compared with those of the membership."""

    def read(self, value: object, place: str) -> str:
        """Return the node's name that the schema allows."""
        if not isinstance(value, str) or not is_name(value):
            misfit(place, "is not a valid node name")
        return value


@dataclass(frozen=True, slots=True)
class KnownReason(Plain):
    """A slug that this release knows as a reason, or nothing; any other slug becomes `other`."""

    def read(self, value: object, place: str) -> str:
        """Return the reason that the schema allows."""
        if not isinstance(value, str) or (value and SLUG.fullmatch(value) is None):
            misfit(place, "is not a slug")
        return known_reason(value)


@dataclass(frozen=True, slots=True)
class Text(Plain):
    """Printable ASCII of a bounded length."""

    maximum: int

    def read(self, value: object, place: str) -> str:
        """Return the text that the schema allows."""
        if (
            not isinstance(value, str)
            or len(value) > self.maximum
            or not value.isascii()
            or not (value.isprintable())
        ):
            misfit(place, f"is not printable ASCII text of at most {self.maximum} characters")
        return value


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes; base64 in JSON."""

    maximum: int

    def read(self, value: object, place: str) -> bytes:
        """Return the bytes that the schema allows."""
        try:
            data = base64.b64decode(value, validate=True) if isinstance(value, str) else None
        except (binascii.Error, ValueError, ArithmeticError):
            data = None
        if data is None or len(data) > self.maximum:
            misfit(place, f"is not base64 of at most {self.maximum} bytes")
        return data

    def write(self, value: Any, place: str) -> str:
        """Return the base64 text of bytes that the schema allows."""
        if not isinstance(value, bytes) or len(value) > self.maximum:
            misfit(place, f"is not bytes, at most {self.maximum} of them")
        return base64.b64encode(value).decode()


MEMBERS = Array(NodeName(), 2, 2)
LATE = Array(NodeName(), 2)


class Backend(enum.StrEnum):
    """What a round runs on: a backend of torch.distributed, or none."""

    NCCL = "nccl"
    GLOO = "gloo"
    AGENT = "agent"
    """No backend: a light round, between the agents alone."""


class StoreOp(enum.StrEnum):
    """Operations of a rendezvous store."""

    SET = "set"
    GET = "get"
    ADD = "add"
    WAIT = "wait"
    CHECK = "check"
    DELETE = "delete"


ROUND = Text(64)
REPORT = Record(
    {
        "parts": Array(Text(64), 2 * MAX_RANKS_OF_NODE),
        "uplink": Flag(),
        "pairs": Array(Record({"peer": NodeName(), "ratio": RATIO}), MAX_PAIRS),
    },
    {"node": RATIO},
)
"""What a node reports of itself and of those that it has just met: `observation.PeerReport`."""
VERSION = Text(64)
RANK = Record(
    {
        "rank": Integer(0, 2 * MAX_RANKS_OF_NODE),
        "outcome": Choice(Outcome),
        "stage": Choice(Stage),
        "reason": KnownReason(),
        "entered": Integer(),
        "left": Integer(),
    }
)
TIMING = Record(
    {
        "op": Choice(Op),
        "size": Integer(0, MAX_SIZE),
        "seconds": SECONDS,
        "bus_bandwidth": Number(0, MAX_BANDWIDTH),
        "part": Text(64),
    }
)


OWN_WORK = Record(
    {
        "over": Text(16),
        "role": Text(MAX_SUMMARY_TEXT),
        "ranks": Integer(1, 100_000),
        "rank": RANK_NUMBER,
        **dict.fromkeys(("step_seconds", "slow", "usual"), PART_SECONDS),
        **dict.fromkeys(("between", "within"), Number(0, MAX_VARIANCE)),
    }
)
"""What `jobs.own_work` compares of a node's ranks of a role, over one of its times."""
JOB = Record(
    {
        "job": Text(MAX_SUMMARY_TEXT),
        "state": Text(16),
        "ranks": Integer(0, 100_000),
        "loss": Text(16),
    },
    {
        "world_size": RANK_NUMBER,
        "step": Integer(0, MAX_COUNT),
        "step_highest": Integer(0, MAX_COUNT),
        "steps_per_minute": Number(0, 60 / SHORTEST_STEP),
        "attempts": Integer(1, 100_000),
        "cause": Text(16),
        "culprits": Array(RANK_NUMBER, 8),
        "own_work": Array(OWN_WORK, MAX_OWN_WORK),
    },
)
"""A node's part of a training job."""


@dataclass(frozen=True, slots=True)
class Method:
    """A request and its answer."""

    request: Record
    answer: Record


METHODS: Mapping[str, Method] = {
    "invite": Method(
        Record(
            {
                "round": ROUND,
                "epoch": EPOCH,
                "kind": Choice(RoundKind),
                "backend": Choice(Backend),
                "members": MEMBERS,
                "digest": Text(12),
                "steps": Array(STEP, 32),
                "ranks": Integer(1, MAX_RANKS_OF_NODE),
                "version": VERSION,
                "report": REPORT,
            }
        ),
        Record({"report": REPORT, "clock": CLOCK}),
    ),
    "store": Method(
        Record(
            {
                "round": ROUND,
                "op": Choice(StoreOp),
                "key": Text(MAX_KEY),
                "timeout": Number(0, MAX_WAIT),
            },
            {"value": Data(MAX_VALUE), "amount": Integer(-MAX_EXACT)},
        ),
        Record({}, {"value": Data(MAX_VALUE), "number": Integer(-MAX_EXACT), "flag": Flag()}),
    ),
    "result": Method(  # to the root: a member's workers' results
        Record(
            {
                "round": ROUND,
                "ranks": Array(RANK, MAX_RANKS_OF_NODE),
                "timings": Array(TIMING, 128),
            }
        ),
        Record({}),
    ),
    "conclusion": Method(  # from the root: the round is over
        Record(
            {
                "round": ROUND,
                "outcome": Choice(Outcome),
                "stage": Choice(Stage),
                "timings": Array(TIMING, 128),
                "late": LATE,
                "reason": KnownReason(),
            },
            {"offset": Number(-1e11, 1e11)},
        ),
        Record({}),
    ),
    "lead": Method(  # on demand: the receiver is the first of the members
        Record(
            {
                "members": MEMBERS,
                "kind": Choice(RoundKind),
                "steps": Array(STEP, 32),
            }
        ),
        Record(
            {
                "kind": Choice(RoundKind),
                "backend": Choice(Backend),
                "outcome": Choice(Outcome),
                "stage": Choice(Stage),
                "timings": Array(TIMING, 128),
                "late": LATE,
                "reason": KnownReason(),
            },
            {"report": REPORT},
        ),
    ),
    "absent": Method(
        Record({"end": CLOCK}), Record({})
    ),  # the sender is in maintenance until `end`
    "echo": Method(
        Record({"clock": CLOCK, "payload": Data(MAX_PAYLOAD)}),
        Record({"clock": CLOCK, "payload": Data(MAX_PAYLOAD)}, {"waited": WAITED}),
    ),
    "summary": Method(  # a node's state, for the fleet page
        Record({}),
        Record(
            {
                "version": VERSION,
                "verdict": Text(16),
                "problems": Integer(0, 100_000),
                "unreadable": Integer(0, 100_000),
                "findings": Array(
                    Record(
                        {
                            "slug": Text(MAX_SUMMARY_TEXT),
                            "severity": Text(16),
                            "part": Text(MAX_SUMMARY_TEXT),
                            "summary": Text(MAX_SUMMARY_TEXT),
                        }
                    ),
                    MAX_FINDINGS,
                ),
                "jobs": Array(JOB, MAX_JOBS),
            },
            {
                "watched": Integer(0, 100_000),
                "hours": Text(24),  # the worst of each of the last, as the record marks it
                "left_out": Array(Text(MAX_SUMMARY_TEXT), MAX_JOBS),  # jobs that do not fit `JOB`
            },
        ),
    ),
}


def summary_text(value: object) -> str:
    """Return a text in the form that summaries hold: printable ASCII of a bounded length."""
    shown = str(value)[:MAX_SUMMARY_TEXT]
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in shown)
