"""The runbooks as they are read: what to do now first, and a heading for each link."""

from __future__ import annotations

import re

import pytest

from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.runbooks import anchor, first_step, render, step
from generate.reference import runbooks_md
from tests.symptoms.promtool import ROOT, rule_groups

FINDINGS = [finding for symptom in all_symptoms().values() for finding in symptom.findings]
ALERTS = [alert for symptom in all_symptoms().values() for alert in symptom.alerts]


@pytest.mark.parametrize("slug", all_symptoms())
def test_text(slug: str) -> None:
    """The first heading is what to do now, or where there is no alert the remedy.

    No front matter, and nothing is cited that a reader has not, such as articles by their number.
    """
    text = render(all_symptoms()[slug])
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == ("What to do now" if all_symptoms()[slug].entries else "Remedy")
    assert "+++" not in text
    assert "expr =" not in text
    now = text.partition("## What to do now")[2].partition("## Remedy")[0]
    assert bool(re.search(r"\b(NODE|JOB|PART)\b", now)) == ("stand for the labels" in now)
    assert "{{" not in text.replace("{{ $labels", "")
    numbered = r"\b[Gg]uides? [A-Z]\b.*|(?<![\w`])[A-E]\d{1,2}(?:'s\b| to [A-E]\d| and )"
    assert re.findall(rf"{numbered}|\b[Tt]he guides?\b", text) == []


def test_every_link_has_its_heading() -> None:
    """Each alert's link ends in the anchor of a heading of the file that it leads to."""
    for _, rule in rule_groups():
        if "alert" not in rule:
            continue
        file, _, name = rule["annotations"]["runbook_url"].partition("#")
        text = (ROOT / "docs/runbooks" / f"{file.rpartition('/')[2]}.md").read_text(
            encoding="utf-8"
        )
        assert name in {
            heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)
        }


def test_the_index_names_every_alert() -> None:
    """Each alert stands in the index beside its runbook, with the severities that its rules
    have.
    """
    index = runbooks_md()
    severities: dict[str, set[str]] = {}
    for _, rule in rule_groups():
        if "alert" in rule:
            severities.setdefault(rule["alert"], set()).add(rule["labels"]["severity"])
    assert len(severities) > 50
    for name, found in severities.items():
        assert f"#{name.lower()}) ({' or '.join(sorted(found))})" in index


def test_every_alert_and_finding_says_what_to_do() -> None:
    """The first step of each stands without its labels, and has a command or names a place."""
    for alert in ALERTS:
        assert len(first_step(alert)) > 20
        assert anchor(alert) == alert.name.lower()
    for finding in FINDINGS:
        assert len(step(finding)) > 20
        assert anchor(finding) == finding.name.lower()
