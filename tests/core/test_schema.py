"""Documents that another release, a damaged disk or somebody else may have written."""

from __future__ import annotations

import json

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
        raise error("why")  # noqa: EM101 - the error is what is tested


def test_a_disk_that_fails_is_no_shape() -> None:
    """An OSError stays what it is."""
    with pytest.raises(OSError, match="disk"), schema.reading("the past"):
        raise OSError("disk")  # noqa: EM101 - as above


@pytest.mark.parametrize(("kind", "within", "beyond"), [
    (schema.UNIX_TIME, 253402300799, 253402300800),  # 9999-12-31 23:59:59
    (schema.UNIX_TIME, 0, -1),
    (schema.Integer(), 1 << 53, (1 << 53) + 1),  # what a float has, too
    (schema.Integer(), 0, -1),
    (schema.Integer(3, 5), 5, 6),
    (schema.Number(1.0, 2.5), 2.5, 2.6),
])  # fmt: skip
def test_bounds(kind: schema.Integer | schema.Number, within: float, beyond: float) -> None:
    """A number may be as large or small as its bound, and no further."""
    assert kind.read(within, "it") == within
    with pytest.raises(schema.SchemaError, match="it is not a"):
        kind.read(beyond, "it")
