"""Each limit from both sides: what is just within it is no finding, and what is just beyond is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dshealthd.findings.limits import OPTIONS, all_limits
from tests import yaml_files
from tests.findings.player import found, scene, seconds

CASES = yaml_files.load(Path(__file__).with_name("limits.yml"))
ELSEWHERE = set(CASES["elsewhere"])


@pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{name}-{place}")
    for kind in ("limits", "fixed")
    for name, cases in CASES[kind].items()
    for place, case in enumerate(cases)
])  # fmt: skip
def test_sides(case: dict[str, Any]) -> None:
    """A finding begins with what is beyond its limit, and not with what is within."""
    rows = [row for each in case["samples"] for row in (each if isinstance(each, list) else [each])]

    def is_found(value: str) -> bool:
        samples = [row.replace("@", value) for row in rows]
        document = {"every": "15s", **case, "samples": samples}
        (names,) = found(scene(document), [seconds(case.get("at", "20m"))]).values()
        return any(re.match(rf"{case['finding']}\b", name) for name in names)

    assert not is_found(case["within"])
    assert is_found(case["beyond"])


def test_every_limit_has_two_sides() -> None:
    """A new limit has its cases, too; one that is gone has none."""
    assert CASES["limits"].keys() | ELSEWHERE == all_limits().keys()
    assert CASES["limits"].keys() & ELSEWHERE == set()
    assert all_limits().keys() >= OPTIONS
