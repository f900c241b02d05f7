"""Documents are JSON for every program, and lack no more than what could not be built."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dshealthd.core.documents import LeftOut, dumps, whole
from tests.status_documents import NOT_JSON

MAX_LEFT_OUT = 100
MAX_REASON = 200


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_lacks_is_refused(value: float) -> None:
    """Nothing writes Infinity or NaN, at any depth."""
    for document in (value, [value], {"a": [{"b": value}]}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            dumps(document)
    assert dumps({"a": [1e308]}, separators=(",", ":")) == '{"a":[1e+308]}'


NOTHING: Any = None


@pytest.mark.parametrize(("odd", "reason"), [
    (lambda: 1 / len(()), "ZeroDivisionError: division by zero"),
    (lambda: int(math.inf), "OverflowError: cannot convert float infinity to integer"),
    (lambda: int("x"), "ValueError: invalid literal for int() with base 10: 'x'"),
    (lambda: dict[str, int]()["x"], "KeyError: 'x'"),
    (lambda: NOTHING + 1, "TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'"),
    (lambda: math.inf, "ValueError: Out of range float values are not JSON compliant"),
    (object, "TypeError: Object of type object is not JSON serializable"),
])  # fmt: skip
def test_part_that_cannot_be_built_costs_itself(odd: Any, reason: str) -> None:
    """The parts before and after it are there, and the document names it, with the reason."""
    left_out = LeftOut()
    made = {"a": lambda: 1, "b": odd, "c": lambda: 3}
    assert list(left_out.each("job", made, str, lambda name: made[name]())) == [1, 3]
    assert left_out.section("probe", odd, otherwise=[]) == []
    assert left_out.section("evidence", lambda: {"state": "ok"}) == {"state": "ok"}
    (job, probe) = left_out.document()
    assert (job["part"], probe["part"]) == ("job b", "probe")
    assert job["reason"].startswith(reason)


def test_section_that_is_no_json_is_null() -> None:
    """The rest of the document is there, whatever a section holds."""
    left_out = LeftOut()
    left_out.add_reason("job x", "a reason")
    body = whole({"jobs": [1], "probe": {"figure": math.inf}}, left_out)
    assert json.loads(body) == {
        "jobs": [1],
        "probe": None,
        "left_out": [
            {"part": "job x", "reason": "a reason"},
            {"part": "probe", "reason": NOT_JSON},
        ],
    }


def test_what_is_left_out_is_bounded() -> None:
    """However many parts somebody makes, and whatever their names are, the document stays small."""
    left_out = LeftOut()
    for number in range(MAX_LEFT_OUT + 5):
        left_out.add_reason(f"{number} \ud800" + "x" * 5000, "y" * 5000)
    told = left_out.document()
    assert len(told) == MAX_LEFT_OUT
    assert (
        {len(one["part"]) for one in told} == {len(one["reason"]) for one in told} == {MAX_REASON}
    )
    assert whole({}, left_out).encode()
