"""What several nodes show of a job, as one."""

from __future__ import annotations

from typing import Any

import pytest

from dshealthd.core import schema
from dshealthd.core.schema import SchemaError
from dshealthd.findings.entry import Entry
from dshealthd.findings.overview import JobPart, merge_job


@pytest.mark.parametrize(
    ("field", "values", "whole"),
    [
        ("ranks", (8, 4, 0), 12),
        ("world_size", (None, 16, 16), 16),
        ("world_size", (None, None, None), None),
        ("step", (7, None, 5), 5),
        ("step", (None, None, None), None),
        ("step_highest", (7, None, 9), 9),
        ("steps_per_minute", (60.0, None, 50.0), 50.0),
        ("steps_per_minute", (None, None, None), None),
        ("loss", ("unknown", "finite", "not finite"), "not finite"),
        ("loss", ("unknown", "finite", "finite"), "finite"),
        ("loss", ("unknown", "unknown", "unknown"), "unknown"),
        ("attempts", (2, None, 3), 3),
        ("attempts", (None, None, None), None),
    ],
)
def test_figures_of_all_nodes(field: str, values: tuple[Any, ...], whole: object) -> None:
    """The slowest pace, the lowest and highest step, the worst loss, whichever node comes first."""
    for order in (values, values[::-1]):
        parts = [JobPart("training", **{field: value}) for value in order]
        assert getattr(merge_job(parts), field) == whole


@pytest.mark.parametrize(("state", "pace"), [("training", 60.0), ("hung", None), ("failed", None)])
def test_only_what_trains_has_a_pace(state: str, pace: float | None) -> None:
    """The last one says nothing of a job that has stopped since."""
    assert merge_job([JobPart(state, "input", steps_per_minute=60.0)]).steps_per_minute == pace


@pytest.mark.parametrize("field", ["kind", "what", "says", "part", "reason", "job"])
def test_texts_of_an_entry(field: str) -> None:
    """Two hundred characters are read back from the record, one more is not."""
    given: dict[str, Any] = {"kind": "boot", "what": "boot", "says": "", "begin": 1.0, "end": 1.0}
    kind = schema.of(Entry)
    document = Entry(**given).document()
    assert getattr(kind.read(document | {field: "x" * 200}), field) == "x" * 200
    with pytest.raises(SchemaError, match=field):
        kind.read(document | {field: "x" * 201})
