"""Messages: what is read is exactly what was declared."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
)
from dshealthd.probe.observation import Stage
from dshealthd.probe.peers.fields import RATIO, REASONS, KnownReason, NodeName, Ratios, Text
from dshealthd.probe.peers.messages import METHODS, Data

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
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
        values(kind.item),
        min_size=kind.minimum,
        max_size=min(kind.maximum, max(kind.minimum, 3)),
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


@pytest.mark.parametrize("record", RECORDS)
@given(data=st.data())
def test_any_json_is_a_message_or_refused(record: Record, data: st.DataObject) -> None:
    """Whatever stands in a field is read as declared or refused; nothing else is raised."""
    message = data.draw(
        st.fixed_dictionaries(
            {}, optional=dict.fromkeys({**record.fields, **record.optional}, JSON)
        )
    )
    try:
        read = loads(json.dumps(message).encode(), record)
    except SchemaError:
        return
    assert read.keys() <= {**record.fields, **record.optional}.keys()


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(body: bytes) -> None:
    """Whatever bytes come, nothing but a SchemaError is raised."""
    try:
        loads(body, METHODS["echo"].request)
    except SchemaError:
        return


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


@pytest.mark.parametrize("value", [{"a": b"abcd"}, {"a": "abc"}, {"a": b"a", "b": 1}])
def test_own_messages_are_checked_too(value: dict[str, Any]) -> None:
    """What is not declared is not sent either."""
    with pytest.raises(SchemaError):
        dumps(value, Record({"a": Data(3)}))


@pytest.mark.parametrize(
    ("number", "allowed"),
    [(-(1 << 53), True), (1 << 53, True), (-(1 << 53) - 1, False), ((1 << 53) + 1, False)],
)
def test_numbers_of_the_store(number: int, *, allowed: bool) -> None:
    """What a float has, too, on either side of 0: torch counts down with negative amounts."""
    key = {"round": "0123456789abcdef", "op": "add", "key": "k", "timeout": 1.0}
    for kind, value in (
        (METHODS["store"].request, key | {"amount": number}),
        (METHODS["store"].answer, {"number": number}),
    ):
        with contextlib.nullcontext() if allowed else pytest.raises(SchemaError, match="integer"):
            kind.read(value, "body")


@pytest.mark.parametrize(("members", "allowed"), [("a", False), ("ab", True), ("abc", False)])
def test_a_round_between_nodes_has_two(members: str, *, allowed: bool) -> None:
    """Local rounds are nobody else's."""
    body = {"members": [*members], "kind": "pair", "steps": []}
    with contextlib.nullcontext() if allowed else pytest.raises(SchemaError, match="2 items"):
        METHODS["lead"].request.read(body)
