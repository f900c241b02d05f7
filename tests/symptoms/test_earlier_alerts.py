"""Where each alert went that was a rule of Prometheus before nodes judged themselves."""

from __future__ import annotations

import csv
from pathlib import Path

from dshealthd.symptoms import all_symptoms

FILE = Path(__file__).parent / "earlier_alerts.tsv"


def test_each_has_its_successor() -> None:
    """What an earlier alert told is told by one that there is, or the table says why by none."""
    lines = (line for line in FILE.read_text(encoding="utf-8").splitlines() if line[:1] != "#")
    rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    names = {entry.name for symptom in all_symptoms().values() for entry in symptom.entries}
    assert len({before for before, *_ in rows}) == len(rows) == 168
    for before, now, *why in rows:
        assert f"Dshealthd{now}" in names or (now == "-" and why), before
