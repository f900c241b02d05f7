"""Each limit from both sides: what is just within it is no finding, and what is just beyond is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dshealthd.findings.limits import OPTIONS, all_limits
from tests import yaml_files
from tests.findings.player import found, scene, seconds

CASES = yaml_files.load(Path(__file__).with_name("limits.yml"))
ELSEWHERE = {name for names in CASES["elsewhere"].values() for name in names}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{place}")
        for kind in ("limits", "fixed")
        for name, cases in CASES[kind].items()
        for place, case in enumerate(cases)
    ],
)
def test_sides(case: dict[str, Any]) -> None:
    """A finding begins with what is beyond its limit, and not with what is within."""
    rows = [row for each in case["samples"] for row in (each if isinstance(each, list) else [each])]

    def named(value: str) -> set[str]:
        samples = [row.replace("@", value) for row in rows]
        at = seconds(case.get("at", "20m"))
        document = {"every": case.get("every", "15s"), "samples": samples}
        (names,) = found(scene(document), [at]).values()
        return {name.split()[0] for name in names}

    assert case["finding"] not in named(case["within"])
    assert case["finding"] in named(case["beyond"])


def test_every_limit_has_two_sides() -> None:
    """A new limit has its cases, too; one that is gone has none."""
    assert CASES["limits"].keys() | ELSEWHERE == all_limits().keys()
    assert CASES["limits"].keys() & ELSEWHERE == set()
    assert all_limits().keys() >= OPTIONS
