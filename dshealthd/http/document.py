"""The status document and the node's record as commands receive them: checked once, here.

docs/status-api.md and docs/history.md describe them.

Whoever answers may be broken, hostile or of another release. What passes has the declared fields
with the declared types; fields that are not declared pass if they are not nested deeply. Text is
still untrusted: make it safe where it is printed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dshealthd.core.documents import MAX_REASON
from dshealthd.core.schema import (
    FIGURE,
    Array,
    Choice,
    Flag,
    Integer,
    Number,
    OrNull,
    Plain,
    Record,
    SchemaError,
    String,
    Type,
    misfit,
    of,
)
from dshealthd.core.text import printable
from dshealthd.findings.coverage import HEARTBEAT, WORDS
from dshealthd.findings.entry import Entry
from dshealthd.findings.finding import ORDER, SCHEMA, Finding, State

MAX_DOCUMENT = 8 << 20
"""Most bytes of an agent's answer, for every command; a node with many ranks sends about 2 MiB."""
_MAX_CONTAINERS = MAX_DOCUMENT // 24
"""Most lists and objects in a document: an empty one takes 2 bytes there and 64 in memory. A sample
has two in some 50 bytes."""
_MAX_DEPTH = 8
"""Deepest nesting of a field that is not declared."""
TIME = Number(0, 1e11)
"""Unix time, at most that of the year 5138: clocks are wrong, but `localtime` has a range."""
WHOLE = of(int)
TEXT = String()


class DocumentError(ValueError):
    """The answer is no status document that can be believed; the message says why."""


@dataclass(frozen=True, slots=True)
class Shallow(Plain):
    """Any value that is not nested deeply, so that nothing that walks it runs out of stack."""

    depth: int = _MAX_DEPTH

    def read(self, value: object, place: str) -> Any:
        level, depth = [value], 0
        while level:
            if depth > self.depth:
                misfit(place, "is nested too deeply")
            level = [
                item
                for entry in level
                if isinstance(entry, list | dict)
                for item in (entry.values() if isinstance(entry, dict) else entry)
            ]
            depth += 1
        return value


@dataclass(frozen=True, slots=True)
class SampleList(Plain):
    """All samples by metric: thousands, so that they are checked in one loop and not copied."""

    def read(self, value: object, place: str) -> Any:
        if not isinstance(value, dict):
            misfit(place, "is not an object")
        for name, family in value.items():
            samples = family.get("samples") if isinstance(family, dict) else None
            if not isinstance(samples, list):
                misfit(f"{place}.{name}", "has no samples")
            _REST.read({**family, "samples": None}, f"{place}.{name}")
            for sample in samples:
                if not isinstance(sample, dict) or sample.keys() != {"labels", "value"}:
                    misfit(
                        f"{place}.{name}", "has a sample with other fields than labels and value"
                    )
                if not _is_number(sample["value"]):
                    misfit(f"{place}.{name}", "has a sample without a number")
                labels = sample["labels"]
                if not isinstance(labels, dict) or not all(
                    isinstance(label, str) for label in labels.values()
                ):
                    misfit(f"{place}.{name}", "has a label that is not a text")
        return value


def _is_number(value: object) -> bool:
    """Return whether a sample has a value: finite, or as Prometheus writes other numbers."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return abs(value) < sys.float_info.max
    return value in ("NaN", "+Inf", "-Inf")


_REST = Shallow()


def _record(fields: Mapping[str, Type], **optional: Type) -> Record:
    return Record(fields, optional, _REST)


_HANG = _record(
    {
        "cause": TEXT,
        "overdue_seconds": OrNull(FIGURE),
        "says": TEXT,
        "culprits": Array(_record({"rank": WHOLE, "reason": TEXT, "says": TEXT})),
    }
)
_STALL = _record(
    {
        **dict.fromkeys(("cause", "says"), TEXT),
        "silent_seconds": FIGURE,
        "hung_in_seconds": OrNull(FIGURE),
    }
)
_RANK = _record(
    {
        "rank": WHOLE,
        "step": OrNull(WHOLE),
        **dict.fromkeys(("step_seconds", "overdue_seconds", "bound_seconds"), OrNull(FIGURE)),
        **dict.fromkeys(("work_seconds", "wait_seconds", "work_ratio"), OrNull(FIGURE)),
        **dict.fromkeys(("phase", "stage", "process", "gpu"), OrNull(TEXT)),
        "heartbeat": OrNull(TIME),
    }
)
_OWN_WORK = _record(
    {
        **dict.fromkeys(("over", "role"), TEXT),
        **dict.fromkeys(("ranks", "rank"), WHOLE),
        **dict.fromkeys(("step_seconds", "slow", "usual", "between", "within"), FIGURE),
    }
)
_JOB = _record(
    {
        **dict.fromkeys(("job", "loss", "state"), TEXT),
        "ranks_here": WHOLE,
        **dict.fromkeys(("world_size", "step", "step_highest", "attempts"), OrNull(WHOLE)),
        "steps_per_minute": OrNull(FIGURE),
        "hang": OrNull(_HANG),
        "stall": OrNull(_STALL),
        "evidence": OrNull(TEXT),
        "ranks": Array(_RANK),
        "followed": _record({}, **dict.fromkeys((HEARTBEAT, *WORDS), WHOLE)),
        "own_work": Array(_OWN_WORK),
        "failures": Array(_record({"slug": TEXT, "rank": OrNull(WHOLE), "node": TEXT})),
    }
)
_COLLECTOR = _record(
    {
        **dict.fromkeys(("name", "state", "detail"), TEXT),
        "reason": OrNull(TEXT),
        "faults": Array(_record(dict.fromkeys(("part", "reason", "detail"), TEXT))),
    }
)
_ROUND = _record({"time": TIME, "members": Array(TEXT), **dict.fromkeys(("kind", "outcome"), TEXT)})
_SUSPECT = _record(dict.fromkeys(("kind", "component", "reason"), TEXT))
_PROBE = _record(
    {"state": TEXT},
    detail=TEXT,
    name=TEXT,
    members=WHOLE,
    period_seconds=FIGURE,
    rounds=Array(_ROUND),
    suspects=Array(_SUSPECT),
)
STATUS = _record(
    {
        "schema": Integer(SCHEMA, SCHEMA),
        **dict.fromkeys(("node", "version"), TEXT),
        "time": TIME,
        "ready": Flag(),
        "verdict": Choice(State),
        **dict.fromkeys(("findings", "watched"), Array(of(Finding, _REST))),
        "jobs": Array(_JOB),
        "collectors": Array(_COLLECTOR),
        "metrics": SampleList(),
    },
    probe=OrNull(_PROBE),
    left_out=Array(_record(dict.fromkeys(("part", "reason"), TEXT))),
)
"""The fields that commands read."""
HISTORY = _record(
    {
        "schema": Integer(SCHEMA, SCHEMA),
        **dict.fromkeys(("node", "problem"), TEXT),
        "time": TIME,
        "since": OrNull(TIME),
        "in_the_future": WHOLE,
        "days": Array(
            _record({"day": TEXT, "worst": OrNull(Choice(State)), "watched_seconds": FIGURE})
        ),
        **dict.fromkeys(("entries", "runs"), Array(of(Entry, _REST))),
    }
)
"""A node's record."""


def parse(body: bytes) -> dict[str, Any]:
    """Return the status document in an answer; DocumentError if it cannot be believed.

    A verdict that is not the worst of the findings is a contradiction, and believed neither way.
    """
    document = _read(body, STATUS, "status document")
    severities = [finding.severity for finding in document["findings"]]
    worst = max(severities, key=ORDER.index, default=State.OK)
    if document["verdict"] != worst:
        message = f'sent the verdict "{document["verdict"]}", but its worst finding is "{worst}"'
        raise DocumentError(message)
    return document


def parse_history(body: bytes) -> dict[str, Any]:
    """Return the record in an answer; DocumentError if it cannot be believed."""
    return _read(body, HISTORY, "record")


def _read(body: bytes, schema: Record, kind: str) -> dict[str, Any]:
    if len(body) > MAX_DOCUMENT or body.count(b"[") + body.count(b"{") > _MAX_CONTAINERS:
        raise DocumentError(f"sent a {kind} that is too large")
    try:
        found = json.loads(body.decode(), parse_constant=_constant)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise DocumentError(f"sent invalid JSON: {error}") from error
    if (
        isinstance(found, dict)
        and type(version := found.get("schema")) is int
        and version != SCHEMA
    ):
        raise DocumentError(f"answers in schema version {version}, this command needs {SCHEMA}")
    try:
        return schema.read(found, "document")
    except SchemaError as error:
        message = f"did not send a {kind}: {printable(str(error)[:MAX_REASON])}"
        raise DocumentError(message) from error


def _constant(name: str) -> float:
    raise SchemaError(f"{name} is not a number")
