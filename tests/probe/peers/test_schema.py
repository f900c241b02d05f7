"""Messages: what is read is exactly what was declared."""

from __future__ import annotations

import contextlib
import enum
import math
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd import __version__
from dshealthd.core.schema import (
    Array,
    Choice,
    Flag,
    Form,
    Integer,
    Number,
    OrNull,
    Record,
    Row,
    SchemaError,
    Type,
    dumps,
    loads,
    of,
)
from dshealthd.probe.observation import Outcome, RoundResult, Stage, Timing
from dshealthd.probe.peers import messages
from dshealthd.probe.peers.fields import RATIO, REASONS, KnownReason, NodeName, Ratios, Text
from dshealthd.probe.peers.messages import METHODS, VERSIONS, Data, Method
from dshealthd.probe.peers.protocol import MAX_MESSAGE
from dshealthd.probe.workers.job import RankResult

VALUES: dict[type, Any] = {
    Integer: lambda kind: st.integers(kind.minimum, kind.maximum),
    Number: lambda kind: st.floats(kind.minimum, kind.maximum),
    Flag: lambda _: st.booleans(),
    Choice: lambda kind: st.sampled_from(kind.values),
    NodeName: lambda _: st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,100}", fullmatch=True),
    KnownReason: lambda _: st.sampled_from(["", *sorted(REASONS)]),
    Text: lambda kind: st.text(
        st.characters(min_codepoint=32, max_codepoint=126), max_size=kind.maximum
    ),
    Data: lambda kind: st.binary(max_size=min(kind.maximum, 100)),
    Array: lambda kind: st.lists(
        values(kind.item), min_size=kind.minimum, max_size=min(kind.maximum, max(kind.minimum, 3))
    ).map(tuple),
    Form: lambda kind: values(kind.fields).map(lambda fields: kind.made(**fields)),
    OrNull: lambda kind: st.none() | values(kind.kind),
    Ratios: lambda _: st.dictionaries(values(NodeName()), values(RATIO), max_size=6),
    Row: lambda kind: st.tuples(*map(values, kind.items)),
    Record: lambda kind: st.fixed_dictionaries(
        {name: values(inner) for name, inner in kind.fields.items()},
        optional={name: values(inner) for name, inner in kind.optional.items()},
    ),
}


def values(kind: Type) -> st.SearchStrategy[Any]:
    """Return a strategy for the Python values of a type."""
    strategy: st.SearchStrategy[Any] = VALUES[type(kind)](kind)
    return strategy


RECORDS = [record for method in METHODS.values() for record in (method.request, method.answer)]


@pytest.mark.parametrize("record", RECORDS)
@given(data=st.data())
def test_what_is_written_is_read(record: Record, data: st.DataObject) -> None:
    """Every message that can be written is read as the same values, of the same types."""
    message = data.draw(values(record))
    again = loads(dumps(message, record), record)
    assert again == message
    assert {name: type(value) for name, value in again.items()} == {
        name: type(value) for name, value in message.items()
    }


@pytest.mark.parametrize(("kind", "value"), [
    (Integer(0, 9), 10),
    (Integer(0, 9), -1),
    (Integer(0, 9), 1.0),
    (Integer(0, 9), True),
    (Integer(0, 9), "1"),
    (Number(0, 1), math.nan),
    (Number(0, 1), math.inf),
    (Number(0, 1), 1.1),
    (Number(0, 1), False),
    (Flag(), 1),
    (Choice(Stage), "INVITE"),
    (Choice(Stage), "nothing"),
    (Choice(Stage), ["invite"]),
    (NodeName(), "a/b"),
    (NodeName(), "a b"),
    (NodeName(), ""),
    (NodeName(), "a\n"),
    (NodeName(), "x" * 254),
    (KnownReason(), "a-b"),
    (KnownReason(), "a\n"),
    (Text(3), "abcd"),
    (Text(3), "ä"),
    (Text(3), "a\n"),
    (Text(3), "\x7f"),
    (Data(3), "AAAAAA=="),
    (Data(3), "A"),
    (Data(3), "AA==\n"),
    (Data(3), 3),
    (Ratios(), [["a", 1.0]]),
    (Ratios(), {"a b": 1.0}),
    (Ratios(), {"a": -1.0}),
    (Array(Flag(), 1), [True, True]),
    (Array(Flag(), 2, 2), [True]),
    (Array(Flag(), 2), [1]),
    (Array(Flag(), 2), {}),
    (Record({}), []),
    (Record({"a": Flag()}), {}),
    (Record({}, {"a": Flag()}), {"b": True}),
    (Record({}, {"a": Flag()}), {"a": None}),
])  # fmt: skip
def test_values_that_are_refused(kind: Type, value: object) -> None:
    """A value of another type, or beyond its bounds, is refused with the field's name."""
    with pytest.raises(SchemaError, match=r"^field"):
        kind.read(value, "field")


Stages = enum.StrEnum("Stages", ["INVITE"])


@pytest.mark.parametrize(("kind", "other"), [
    (Number(0, 9), Integer(0, 9)),
    (Number(0, 9), Number(0, 8)),
    (Text(3), Text(4)),
    (Choice(Stage), Choice(Stages)),
    (Ratios(), Ratios(maximum=5)),
    (Ratios(), Ratios(Number(0, 9))),
    (Array(Flag(), 2), Array(Flag(), 2, 1)),
    (Array(Flag(), 2), Array(OrNull(Flag()), 2)),
    (of(Timing).fields, Record({}, of(Timing).fields.fields)),
    (Record({"a": Flag()}), Record({"b": Flag()})),
])  # fmt: skip
def test_versions_tell_what_is_declared(kind: Type, other: Type) -> None:
    """Another type, bound, value or name of a field, or whether it must be there, is another
    version: in a request or an answer.
    """
    rest, one, two = Record({}), Record({"field": kind}), Record({"field": other})
    methods = Method(one, rest), Method(two, rest), Method(rest, one), Method(rest, two)
    assert len({method.version for method in methods}) == 4


def test_versions_are_the_same_everywhere() -> None:
    """What differs between processes of one checkout is no part of them. A round takes what all its
    messages declare.
    """
    script = "from dshealthd.probe.peers.messages import VERSIONS; print(VERSIONS)"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, text=True, capture_output=True, check=True
    )
    assert told.stdout.strip() == str(VERSIONS)
    invite = VERSIONS["invite"].split("-")
    assert {*invite[1:]} > {VERSIONS[name] for name in ("store", "result", "conclusion")}
    assert invite[0] == __version__


@pytest.mark.parametrize("value", [{"a": b"abcd"}, {"a": "abc"}, {"a": b"a", "b": 1}])
def test_own_messages_are_checked_too(value: dict[str, Any]) -> None:
    """What is not declared is not sent either."""
    with pytest.raises(SchemaError):
        dumps(value, Record({"a": Data(3)}))


def of_field(record: Type, name: str) -> Type:
    """Return the type of a field."""
    inner = record.fields if isinstance(record, Form) else record
    assert isinstance(inner, Record)
    return {**inner.fields, **inner.optional}[name]


PLAN, RESULT = METHODS["invite"].request.fields["plan"], METHODS["result"].request
RANK, CONCLUSION = of(RankResult), METHODS["conclusion"].request


@pytest.mark.parametrize(("kind", "least", "most"), [
    (RATIO, 0.0, 1e6),
    (of_field(PLAN, "epoch"), -1, 2**53),
    (of_field(PLAN, "ranks"), 1, 64),
    (of_field(RANK, "rank"), 0, 128),
    (of_field(of(Timing), "size"), 0, 2**30),
    (of_field(of(Timing), "seconds"), 0.0, 1e6),
    (of_field(of(Timing), "bus_bandwidth"), 0.0, 1e14),
    (of_field(METHODS["store"].request, "timeout"), 0.0, 4.0),
    (of_field(METHODS["store"].request, "amount"), -(2**53), 2**53),  # torch counts down, too
    (of_field(METHODS["store"].answer, "number"), -(2**53), 2**53),
    (of_field(CONCLUSION, "offset"), -253402300799.0, 253402300799.0),
    (of_field(messages.OWN_WORK, "slow"), 1e-9, 1e7),
    (of_field(messages.OWN_WORK, "usual"), 1e-9, 1e7),
    (of_field(messages.OWN_WORK, "step_seconds"), 1e-9, 1e7),
    (of_field(messages.OWN_WORK, "between"), 0.0, 1e3),
    (of_field(messages.OWN_WORK, "within"), 0.0, 1e3),
    (of_field(messages.OWN_WORK, "ranks"), 1, 10**7),
    (of_field(messages.OWN_WORK, "rank"), 0, 10**7),
    (of_field(messages.JOB, "ranks"), 0, 10**7),
    (of_field(messages.JOB, "world_size"), 0, 10**7),
    (of_field(messages.JOB, "step"), 0, 10**12),
    (of_field(messages.JOB, "step_highest"), 0, 10**12),
    (of_field(messages.JOB, "steps_per_minute"), 0.0, 6e7),
    (of_field(messages.JOB, "attempts"), 1, 2**53),
])  # fmt: skip
def test_bounds_of_numbers(kind: Type, least: float, most: float) -> None:
    """The first and the last plausible value pass, their neighbors do not."""
    assert (kind.read(least, "field"), kind.read(most, "field")) == (least, most)
    for value, away in ((least, -math.inf), (most, math.inf)):
        step = -1 if away < 0 else 1
        beyond = value + step if isinstance(value, int) else math.nextafter(value, away)
        with pytest.raises(SchemaError, match="field"):
            kind.read(beyond, "field")


TIMING = {"op": "echo", "size": 0, "seconds": 1.0, "bus_bandwidth": 0.0}
NAMES = [f"n{number}" for number in range(9)]


@pytest.mark.parametrize(("kind", "of_length", "most"), [
    (of_field(PLAN, "round"), "x".__mul__, 64),
    (of_field(PLAN, "digest"), "x".__mul__, 64),
    (of_field(of(Timing), "part"), "x".__mul__, 64),
    (of_field(METHODS["store"].request, "key"), "x".__mul__, 256),
    (of_field(METHODS["store"].request, "value"), lambda n: b64encode(b"x" * n).decode(), 45_000),
    (of_field(METHODS["echo"].request, "payload"), lambda n: b64encode(b"x" * n).decode(), 48_000),
    (KnownReason(), "x".__mul__, 48),
    (messages.TEXT, "x".__mul__, 128),
    (of_field(PLAN, "steps"), [(2**30, 1000)].__mul__, 32),
    (of_field(PLAN, "steps"), lambda n: [(1, n)], 1000),
    (of_field(RESULT, "timings"), [TIMING].__mul__, 256),
    (of_field(RESULT, "ranks"), [{"rank": 0, "outcome": "ok", "stage": "done"}].__mul__, 64),
    (of_field(CONCLUSION.fields["result"], "late"), ["n1"].__mul__, 2),
    (of_field(messages.REPORT, "parts"), ["gpu3"].__mul__, 128),
    (of_field(messages.REPORT, "pairs"), lambda n: dict.fromkeys(NAMES[:n], 1.0), 6),
    (of_field(messages.JOB, "culprits"), [0].__mul__, 8),
    (of_field(METHODS["summary"].answer, "left_out"), ["job"].__mul__, 16),
])  # fmt: skip
def test_bounds_of_lengths(kind: Type, of_length: Callable[[int], object], most: int) -> None:
    """What is as long as any passes, what is longer does not."""
    kind.read(of_length(most), "field")
    with pytest.raises(SchemaError, match="field"):
        kind.read(of_length(most + 1), "field")


@pytest.mark.parametrize(("members", "allowed"), [("a", False), ("ab", True), ("abc", False)])
def test_a_round_between_nodes_has_two(members: str, *, allowed: bool) -> None:
    """Local rounds are nobody else's."""
    body = {"members": [*members], "kind": "pair", "steps": []}
    with contextlib.nullcontext() if allowed else pytest.raises(SchemaError, match="2 items"):
        METHODS["lead"].request.read(body)


def test_the_longest_report_of_times_fits_into_a_message() -> None:
    """Of eight rails at 32 sizes, as long as numbers get."""
    timing = Timing("all_reduce", 1 << 30, 0.12345678901234567, 123456789012.34567, "mlx5_10:1")
    result = RoundResult(Outcome.OK, Stage.DONE, (timing,) * 256)
    conclusion = {"round": "f" * 16, "result": result, "offset": -0.00012345678901234567}
    assert len(dumps(conclusion, METHODS["conclusion"].request)) < MAX_MESSAGE
