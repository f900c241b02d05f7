"""The methods of the peer API and the schemas of their messages."""

from __future__ import annotations

import base64
import binascii
import enum
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dshealthd import __version__
from dshealthd.core import schema
from dshealthd.core.schema import (
    MAX_EXACT,
    UNIX_TIME,
    Array,
    Choice,
    Flag,
    Integer,
    Number,
    Record,
    misfit,
)
from dshealthd.probe.observation import (
    Observation,
    PeerReport,
    RoundKind,
    RoundPlan,
    RoundResult,
    Steps,
    Timings,
)
from dshealthd.probe.peers.fields import (
    MAX_KEY,
    MAX_RANKS_OF_NODE,
    MAX_VALUE,
    MAX_WAIT,
    MEMBERS,
    NAME,
    Text,
)
from dshealthd.probe.workers.job import RankResult
from dshealthd.training.message import INSTANT, LONGEST_STEP, MAX_COUNT, SHORTEST_STEP

MAX_PAYLOAD = 48000
"""Bytes of an echo's payload: with base64 and the other fields it fits the largest body."""
MAX_FINDINGS, MAX_JOBS, MAX_CULPRITS, MAX_SUMMARY_TEXT = 4, 16, 8, 128
"""Most findings and jobs in a node's summary, culprits of a job, and characters of each text."""
TEXT = Text(MAX_SUMMARY_TEXT)
MAX_RANKS = 10**7
"""The largest jobs have 10^5 ranks."""
RANK_NUMBER = Integer(0, MAX_RANKS)
PART_SECONDS = Number(INSTANT, LONGEST_STEP)
MAX_OWN_WORK = 16
"""Most of these in a job: four times of four roles."""
MAX_VARIANCE = 1e3
"""Of logarithms of what takes from an instant to the longest step, whose range is 37."""
REPORT = schema.of(PeerReport)
"""What a node reports of itself and of those that it has just met."""
TIMINGS = schema.of(Timings)
OWN_WORK = Record(
    {
        "over": TEXT,
        "role": TEXT,
        "ranks": Integer(1, MAX_RANKS),
        "rank": RANK_NUMBER,
        **dict.fromkeys(("step_seconds", "slow", "usual"), PART_SECONDS),
        **dict.fromkeys(("between", "within"), Number(0, MAX_VARIANCE)),
    }
)
"""What `jobs.own_work` compares of a node's ranks of a role, over one of its times."""
JOB = Record(
    {"job": TEXT, "state": TEXT, "ranks": RANK_NUMBER, "loss": TEXT},
    {
        "world_size": RANK_NUMBER,
        "step": Integer(0, MAX_COUNT),
        "step_highest": Integer(0, MAX_COUNT),
        "steps_per_minute": Number(0, 60 / SHORTEST_STEP),
        "attempts": Integer(1),
        "cause": TEXT,
        "culprits": Array(RANK_NUMBER, MAX_CULPRITS),
        "own_work": Array(OWN_WORK, MAX_OWN_WORK),
    },
)
"""A node's part of a training job."""


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


class StoreOp(enum.StrEnum):
    """Operations of a rendezvous store."""

    SET = "set"
    GET = "get"
    ADD = "add"
    WAIT = "wait"
    CHECK = "check"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Method:
    """A request and its answer."""

    request: Record
    answer: Record

    @property
    def version(self) -> str:
        """A digest of the declared fields, types and bounds. Agents whose digests are equal read
        each other's messages; no other can tell whether a message is malformed.
        """
        return f"{zlib.crc32(repr(self).encode()):08x}"


METHODS: Mapping[str, Method] = {
    "invite": Method(
        Record({"plan": schema.of(RoundPlan), "report": REPORT}),
        Record({"report": REPORT, "clock": UNIX_TIME}),
    ),
    "store": Method(
        Record(
            {
                "round": NAME,
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
                "round": NAME,
                "ranks": Array(schema.of(RankResult), MAX_RANKS_OF_NODE),
                "timings": TIMINGS,
            }
        ),
        Record({}),
    ),
    "conclusion": Method(  # from the root: the round is over
        Record(
            {"round": NAME, "result": schema.of(RoundResult)},
            {"offset": Number(-UNIX_TIME.maximum, UNIX_TIME.maximum)},
        ),
        Record({}),
    ),
    "lead": Method(  # on demand: the receiver is the first of the members
        Record({"members": MEMBERS, "kind": Choice(RoundKind), "steps": schema.of(Steps)}),
        Record({"observation": schema.of(Observation)}),
    ),
    "absent": Method(  # the sender is in maintenance until `end`
        Record({"end": UNIX_TIME}), Record({})
    ),
    "echo": Method(
        Record({"clock": UNIX_TIME, "payload": Data(MAX_PAYLOAD)}),
        Record(
            {"clock": UNIX_TIME, "payload": Data(MAX_PAYLOAD)},
            {"waited": UNIX_TIME},  # seconds of the agent's life for which it waited for a CPU
        ),
    ),
    "summary": Method(  # a node's state, for the fleet page
        Record({}),
        Record(
            {
                "version": TEXT,
                "verdict": TEXT,
                "problems": Integer(),
                "unreadable": Integer(),
                "findings": Array(
                    Record(dict.fromkeys(("slug", "severity", "part", "summary"), TEXT)),
                    MAX_FINDINGS,
                ),
                "jobs": Array(JOB, MAX_JOBS),
            },
            {
                "watched": Integer(),
                "hours": TEXT,  # the worst of each of the last, as the record marks it
                "left_out": Array(TEXT, MAX_JOBS),  # jobs beyond those, or that do not fit `JOB`
            },
        ),
    ),
}
VERSIONS = {name: method.version for name, method in METHODS.items()}
"""The version that a call of each method states; a peer with another one declines it."""
VERSIONS["invite"] = "-".join(
    (__version__, *(VERSIONS[name] for name in ("invite", "store", "result", "conclusion")))
)
"""A round takes all its messages, and workers of the same release, whose times compare."""


def summary_text(value: object) -> str:
    """Return a text in the form that summaries hold: printable ASCII of a bounded length."""
    shown = str(value)[:MAX_SUMMARY_TEXT]
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in shown)
