"""Documents that another release, a damaged disk or somebody else may have written."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core import documents, schema

SOUND = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(SOUND)
def test_what_we_write_is_read(value: object) -> None:
    """Finite numbers and integers of 64 bits, as the agent writes them, come back."""
    assert schema.document(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "x", "NaN", "[Infinity]", "[-Infinity]", "1e400", "[1e999]"),
        *("1" + "0" * 20, "9" * 5000, "[" * 100_000, '{"a":' * 100_000, '{"a":1,"a":2}'),
    ],
)
def test_anything_else_is_one_error(text: str) -> None:
    """What is no JSON, ambiguous, nested too deeply or a number without bounds is a SchemaError."""
    with pytest.raises(schema.SchemaError):
        schema.document(text)
    with pytest.raises(schema.SchemaError):
        schema.document(text.encode())
    with pytest.raises(schema.SchemaError):
        schema.document(b"\xff" + text.encode())


@pytest.mark.parametrize("error", documents.MISSHAPEN)
def test_errors_over_a_shape_become_one(error: type[Exception]) -> None:
    """Whatever reading a document of another shape raises names what was read, and why."""
    with (
        pytest.raises(schema.SchemaError, match=r"^the past is not what this .*: .*: why"),
        schema.reading("the past"),
    ):
        raise error("why")


def test_a_disk_that_fails_is_no_shape() -> None:
    """An OSError stays what it is."""
    with pytest.raises(OSError, match="disk"), schema.reading("the past"):
        raise OSError("disk")


@pytest.mark.parametrize(("kind", "within", "beyond"), [
    (schema.UNIX_TIME, 253402300799, 253402300800),  # 9999-12-31 23:59:59
    (schema.UNIX_TIME, 0, -1),
    (schema.Integer(), 1 << 53, (1 << 53) + 1),  # what a float has, too
    (schema.Integer(), 0, -1),
    (schema.Integer(3, 5), 5, 6),
    (schema.of(int), 2**63, 2**63 + 1),  # of 64 bits, with a sign or without
    (schema.of(int), -(2**63), -(2**63) - 1),
    (schema.Number(1.0, 2.5), 2.5, 2.6),
])  # fmt: skip
def test_bounds(kind: schema.Integer | schema.Number, within: float, beyond: float) -> None:
    """A number may be as large or small as its bound, and no further."""
    assert kind.read(within, "it") == within
    with pytest.raises(schema.SchemaError, match="it is not a"):
        kind.read(beyond, "it")


class Pair(NamedTuple):
    """A row of a document."""

    rank: int
    share: float


class Color(enum.StrEnum):
    """A choice."""

    RED = "red"


@dataclass(slots=True)
class Inner:
    """A part of an object."""

    name: Annotated[str, schema.String(3)]


@dataclass(slots=True)
class Whole:
    """An object with a field of each kind."""

    color: Color
    inner: Inner
    pair: Pair
    places: dict[tuple[int, int], Inner]
    counts: dict[str, int]
    value: float | None = None
    names: list[str] = field(default_factory=list)
    now: float = schema.transient(default=7.0)


WHOLE = Whole(Color.RED, Inner("a"), Pair(1, 0.5), {(1, 2): Inner("b")}, {"x": 3}, 2.5, ["n"])


def test_an_object_is_its_own_document() -> None:
    """It is read as it was written, but for what does not outlive the agent."""
    written = json.loads(json.dumps(schema.of(Whole).write(dataclasses.replace(WHOLE, now=1.0))))
    assert "now" not in written
    assert schema.of(Whole).read(written) == WHOLE
    least = {name: written[name] for name in ("color", "inner", "pair", "places", "counts")}
    assert schema.of(Whole).read(least) == dataclasses.replace(WHOLE, value=None, names=[])


@pytest.mark.parametrize(("field", "value", "message"), [
    ("color", "blue", "body.color is not a valid Color"),
    ("inner", {"name": "long"}, "body.inner.name is not a text of at most 3 characters"),
    ("inner", {}, "body.inner lacks name"),
    ("pair", [1], "body.pair is not a list of 2 items"),
    ("pair", [1.5, 1], r"body.pair\[0\] is not an integer"),
    ("places", [[[1], {"name": "b"}]], r"body.places\[0\]\[0\] is not a list of 2 items"),
    ("counts", {"x": "3"}, "body.counts.x is not an integer"),
    ("value", "1", "body.value is not a number"),
    ("now", 1.0, "body has an unknown field"),
])  # fmt: skip
def test_an_error_names_the_field(field: str, value: object, message: str) -> None:
    """What does not fit is refused with its place in the document."""
    written = schema.of(Whole).write(WHOLE)
    with pytest.raises(schema.SchemaError, match=message):
        schema.of(Whole).read({**written, field: value})


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(("kind", "most"), [(schema.of(str), 1000), (schema.String(), 1 << 20)])
def test_how_long_a_text_is(kind: schema.String, most: int, more: int) -> None:
    """That of an object is as long as the errors of drivers and file systems."""
    text = "x" * (most + more)
    with pytest.raises(schema.SchemaError, match=f"{most} char") if more else nullcontext():
        assert kind.read(text, "it") == text


def test_what_others_add_is_left_out() -> None:
    """An object of another release may have more fields, if these are allowed."""
    written = schema.of(Inner).write(Inner("a"))
    assert schema.of(Inner, schema.String()).read({**written, "later": "x"}) == Inner("a")


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400])
def test_a_figure_that_json_lacks_is_null(value: float) -> None:
    """And a text that is too long, or no Unicode, is written as far as it can be read."""
    assert schema.of(float | None).write(value, "it") is None
    assert schema.String(3).write("a\ud800bc", "it") == "a?b"
