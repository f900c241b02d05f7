"""The runbooks as they are read: what to do now first, and a heading for each link."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.runbooks import anchor, first_step, render, step
from generate.reference import runbooks_md
from tests.symptoms.promtool import ROOT, rule_groups

if TYPE_CHECKING:
    from dshealthd.symptoms.entry import Alert, FindingType

FINDINGS = [finding for symptom in all_symptoms().values() for finding in symptom.findings]
ALERTS = [(symptom, alert) for symptom in all_symptoms().values() for alert in symptom.alerts]


@pytest.mark.parametrize("slug", all_symptoms())
def test_begins_with_what_to_do(slug: str) -> None:
    """The first heading is what to do now, or where there is no alert the remedy.

    No front matter.
    """
    text = render(all_symptoms()[slug])
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == ("What to do now" if all_symptoms()[slug].entries else "Remedy")
    assert "+++" not in text
    assert "expr =" not in text
    assert "{{" not in text.replace("{{ $labels", "")


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


@pytest.mark.parametrize("slug", all_symptoms())
def test_cites_nothing_that_a_reader_has_not(slug: str) -> None:
    """A runbook says what advice is wrong, and not by the letter and number of some article."""
    text = render(all_symptoms()[slug])
    assert (
        re.findall(r"\b[Gg]uides? [A-Z]\b.*|(?<![\w`])[A-E]\d{1,2}(?:'s\b| to [A-E]\d| and )", text)
        == []
    )
    assert re.findall(r"\bthe guides?\b", text, re.IGNORECASE) == []


@pytest.mark.parametrize("alert", [alert for _, alert in ALERTS], ids=lambda alert: alert.name)
def test_every_alert_says_what_to_do(alert: Alert) -> None:
    """The first step of each alert stands without its labels, and has a command or names a
    place.
    """
    step = first_step(alert)
    assert len(step) > 20
    assert anchor(alert) == alert.name.lower()


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_every_finding_says_what_to_do(finding: FindingType) -> None:
    """The first step of each finding stands without its labels, too."""
    assert len(step(finding)) > 20
    assert anchor(finding) == finding.name.lower()
