"""Where each alert went that was a rule of Prometheus before nodes judged themselves."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from dshealthd.symptoms import all_symptoms

TESTS = Path(__file__).parent.parent
FILE = Path(__file__).parent / "earlier_alerts.tsv"
RULES = 168
"""Alerts that there were."""


class Row(NamedTuple):
    """One alert of then."""

    before: str
    now: str
    """The alert that says it now; `-` if none does."""
    file: str
    """Where it is shown, below the folder of all tests."""
    scene: str
    """The beginning of the scene's name, or the test's name; why none says it any more."""


def rows() -> list[Row]:
    """Return the rows of the table."""
    lines = [
        line
        for line in FILE.read_text(encoding="utf-8").splitlines()
        if not line.startswith(("#", "before\t"))
    ]
    return [Row(*row) for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]


ROWS = rows()


def test_all_are_there() -> None:
    """Each of them is accounted for, once."""
    assert len({row.before for row in ROWS}) == len(ROWS) == RULES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.before)
def test_each_has_its_successor(row: Row) -> None:
    """What it told is told by an alert that there is, in a scene that expects that; or it is said
    why nobody needs it.
    """
    if row.now == "-":
        assert len(row.scene) > 40
        return
    names = {entry.name for symptom in all_symptoms().values() for entry in symptom.entries}
    assert f"Dshealthd{row.now}" in names
    text = (TESTS / row.file).read_text(encoding="utf-8")
    if row.file.endswith(".py"):
        assert f"def {row.scene}(" in text
        assert row.now in text
        return
    document = yaml.load(text, yaml.CSafeLoader)
    scenes = document if isinstance(document, list) else document["tests"]
    (scene,) = (scene for scene in scenes if scene["name"].startswith(row.scene))
    assert any(re.search(rf"\b(Dshealthd)?{row.now}\b", said) for said in expected(scene))


def expected(scene: dict[str, object]) -> list[str]:
    """Return what a scene expects to be found or to fire, as text."""
    found = scene.get("found")
    if isinstance(found, dict):
        return [name for names in found.values() for name in names]
    alerts = scene.get("alert_rule_test", ())
    queries = scene.get("promql_expr_test", ())
    assert isinstance(alerts, list | tuple)
    assert isinstance(queries, list | tuple)
    return [
        *(test["alertname"] for test in alerts if test.get("exp_alerts")),
        *(test["expr"] for test in queries if test.get("exp_samples")),
    ]
