"""A status document is checked once: what passes can be read without a further look."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshealthd.core import documents
from dshealthd.core.schema import Plain, SchemaError
from dshealthd.findings.finding import State
from dshealthd.http.document import TIME, DocumentError, Shallow, parse
from dshealthd.slurm import agent
from dshealthd.slurm.options import DRAIN_FOR
from dshealthd.status import text
from dshealthd.status.jobs import job_lines, parts_of, ranks
from dshealthd.status.paint import Paint
from dshealthd.status.query import AgentAnswer, report
from tests.status_documents import document, finding, job, rank
from tests.trees import ABSENT, changed, places

MAX_DOCUMENT = 8 << 20

ROUND = {"time": 1.0, "members": ["n1", "n2"], "kind": "pair", "outcome": "ok", "timings": []}
FULL = document(
    verdict="critical",
    findings=[finding(), finding(severity="unknown", since=None, value=1, limit=2.5)],
    jobs=[
        job(
            hang={
                "cause": "input",
                "says": "work between steps",
                "overdue_seconds": 9.0,
                "culprits": [{"rank": 0, "reason": "input", "says": "has not begun"}],
            },
            followed={"heartbeat": 1, "nothing": 1, "later": [1]},
            stall={
                "cause": "between_steps",
                "says": "between two steps",
                "silent_seconds": 45.0,
                "hung_in_seconds": 600,
            },
            failures=[{"slug": "cuda-oom", "rank": None, "node": ""}],
            ranks=[rank(), rank(rank=1, step=None, phase=None, gpu=None)],
        )
    ],
    collectors=[
        {
            "name": "gpu",
            "state": "failing",
            "reason": "timeout",
            "detail": "no answer",
            "faults": [{"part": "GPU 3", "reason": "timeout", "detail": "no answer"}],
        }
    ],
    probe={
        "state": "ok",
        "detail": "",
        "name": "n1",
        "members": 2,
        "period_seconds": 60,
        "rounds": [ROUND],
        "suspects": [{"kind": "node", "component": "n2", "reason": "slow"}],
    },
    metrics={
        "dshealthd_gpu_up": {
            "kind": "gauge",
            "help": "h",
            "samples": [
                {"labels": {"gpu": "0", "name": "x", "self": "y"}, "value": 1},
                {"labels": {}, "value": "NaN"},
            ],
        },
        "dshealthd_infiniband_port_up": {"samples": [{"labels": {"name": "x"}, "value": 1.0}]},
        "dshealthd_nvlink_up": {"samples": [{"labels": {"gpu": "0"}, "value": "+Inf"}]},
    },
)


def read(found: Any) -> dict[str, Any]:
    """Return a document after its way over the wire."""
    return parse(json.dumps(found).encode())


def shown(found: dict[str, Any]) -> str:
    """Return all that commands make of a document."""
    answer = AgentAnswer("n1", "http://n1", found)
    lines = list(text.node(answer, Paint(color=False)))
    for one in found["jobs"]:
        parts = parts_of(one["job"], [answer])
        lines += [*job_lines(one["job"], parts, Paint(color=False)), *ranks(parts)]
    agent.judge(found, frozenset(DRAIN_FOR))
    return "\n".join([*lines, documents.dumps(report([answer]))])


def test_a_document_with_everything_is_read() -> None:
    """Each part of a valid document can be shown; fields that are not declared pass."""
    found = read({**FULL, "from_a_later_release": {"a": [1, {"b": None}]}})
    assert found["from_a_later_release"] == {"a": [1, {"b": None}]}
    assert (found["verdict"], found["probe"]["members"]) == (State.CRITICAL, 2)
    assert "suspect node n2: slow" in shown(found)
    assert "followed: 1 by heartbeats, 1 by nothing" in shown(found)


def nested(depth: int) -> Any:
    """Return a list in a list, and so on."""
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(("kind", "within", "beyond"), [
    (TIME, 1e11, 1.1e11),
    (Shallow(), nested(8), nested(9)),
], ids=["time", "depth"])  # fmt: skip
def test_bounds(kind: Plain, within: Any, beyond: Any) -> None:
    """Of what nothing else bounds: `localtime` has a range, and a walk has a stack."""
    assert kind.read(within, "it") == within
    with pytest.raises(SchemaError):
        kind.read(beyond, "it")


WRONG = {
    "a finding without keys": {"verdict": "critical", "findings": [{}]},
    "findings is a text": {"findings": "x"},
    "jobs is null": {"jobs": None},
    "a hang that is a text": {"jobs": [job(hang="x")]},
    "a stall without a time": {"jobs": [job(stall={"says": "x"})]},
    "what follows ranks is a text": {"jobs": [job(followed="ras")]},
    "ranks followed that are none": {"jobs": [job(followed={"ras": "1"})]},
    "a rank that is a text": {"jobs": [job(ranks=[rank(rank="\x1b[2J")])]},
    "a step that is none": {"jobs": [job(ranks=[rank(step=1.5)])]},
    "a probe that is a list": {"probe": []},
    "a round in no year": {"probe": {"state": "ok", "rounds": [{**ROUND, "time": 1e300}]}},
    "metrics without samples": {"metrics": {"a": {}}},
    "a sample without a value": {"metrics": {"a": {"samples": [{"labels": {}}]}}},
    "a value that is a text": {"metrics": {"a": {"samples": [{"labels": {}, "value": "1"}]}}},
    "a value that is true": {"metrics": {"a": {"samples": [{"labels": {}, "value": True}]}}},
    "a value without end": {"metrics": {"a": {"samples": [{"labels": {}, "value": 10**400}]}}},
    "a label that is a list": {"metrics": {"a": {"samples": [{"labels": {"b": []}, "value": 1}]}}},
    "a deep sample": {"metrics": {"a": {"samples": [{"labels": {}, "value": 1, "x": 1}]}}},
    "a deep family": {"metrics": {"a": {"samples": [], "x": nested(20)}}},
    "a very deep field": {"x": nested(500)},
    "a deep field of a job": {"jobs": [job(x=nested(20))]},
    "an unknown verdict": {"verdict": "fine"},
    "a schema that is true": {"schema": True},
    "ok with a critical finding": {"verdict": "ok", "findings": [finding()]},
    "critical without a finding": {"verdict": "critical"},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_60_a_wrong_document_is_refused(change: dict[str, Any]) -> None:
    """A missing key, another type, deep nesting and a contradiction are one error, of one line."""
    with pytest.raises(DocumentError) as caught:
        read({**document(), **change})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["schema", "node", "verdict", "findings", "jobs", "metrics"])
def test_60_a_missing_part_is_not_healthy(key: str) -> None:
    """What is left out is unknown, not empty."""
    found = document()
    del found[key]
    with pytest.raises(DocumentError, match=f"lacks {key}"):
        read(found)


@pytest.mark.parametrize("body", [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff",
    b'{"schema":1,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    json.dumps(document(time=float("nan"))).encode(),
    json.dumps({**document(), "x": "\x1b]0;OWNED" * 100, "time": {}}).encode(),
], ids=["nothing", "cut", "list", "null", "not UTF-8", "deep", "NaN", "terminal"])  # fmt: skip
def test_60_what_is_no_document_is_refused(body: bytes) -> None:
    """No JSON, another JSON value, and nesting that ends the parser's stack are refused."""
    with pytest.raises(DocumentError):
        parse(body)


def test_60_a_large_document_is_refused_before_it_is_parsed() -> None:
    """Size and number of containers are bounded, as those of empty lists take 30 times theirs."""
    for body in (b"x" * (MAX_DOCUMENT + 1), b"[" * 349_526, b"[" * 349_525 + b"{"):
        with pytest.raises(DocumentError, match="too large"):
            parse(body)
    with pytest.raises(DocumentError, match="invalid JSON"):
        parse(b"[" * 349_525)


def test_a_name_in_the_answer_is_safe_in_the_error() -> None:
    """The error may quote a key of the answer, which cannot command a terminal or fill a screen."""
    evil = "\x1b[2J" + "x" * 10_000
    with pytest.raises(DocumentError) as caught:
        read(document(metrics={evil: {}}))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_another_schema_is_named() -> None:
    """A later schema is not misread, and the message says which is needed."""
    with pytest.raises(DocumentError, match="answers in schema version 2, this command needs 1"):
        parse(b'{"schema": 2}')


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([*places(FULL)]),
    st.just(ABSENT)
    | st.sampled_from(
        [None, True, -1, 10**30, 1.5, "", "\x1b[2J", "\ud800", "NaN", [], {}, [[]], nested(30)]
    ),
)
def test_whatever_passes_can_be_shown(place: tuple[Any, ...], value: Any) -> None:
    """Any value at any place is either refused or shown by every command, without an escape."""
    try:
        found = read(changed(FULL, place, value))
    except DocumentError:
        return
    assert shown(found).replace("\n", "").replace("\t", "").isprintable()
