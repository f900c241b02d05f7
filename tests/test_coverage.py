"""The table of symptoms in docs/coverage.md: every row, its slug, and tests that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from dshealthd.symptoms import all_symptoms
from tests.lab import catalogue, job_faults
from tests.test_fault_table import exists

TEXT = (Path(__file__).parent.parent / "docs/coverage.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (\d+) \| \[([a-z0-9-]+)\]\(runbooks/\2\.md\) \| (.+?) \| ([a-z]+) \| (.+) \|$",
    TEXT,
    re.MULTILINE,
)
"""Row, slug, fault, how far it is followed, tests."""
OF_COMMANDS = {"doctor", "explain"}
INJECTED = {"webhook", "alert"}


def test_every_symptom_has_its_row() -> None:
    """The rows are those of the symptoms, each once and in order, under its slug."""
    slugs = {symptom.row: slug for slug, symptom in all_symptoms().items() if symptom.row}
    assert [(int(number), slug) for number, slug, *_ in ROWS] == sorted(slugs.items())


def test_every_test_exists() -> None:
    """Each row names tests that exist."""
    for number, _, _, _, tests in ROWS:
        names = re.findall(r"`([^`]+)`", tests)
        assert names
        assert all(map(exists, names)), (number, names)


def test_what_reaches_the_webhook_is_in_the_lab() -> None:
    """A row that claims the webhook is the symptom of a fault of the lab, or covered by one."""
    told = {fault.symptom for fault in catalogue.FAULTS.values()}
    told |= {fault.symptom for fault in job_faults.FAULTS.values()}
    for number, slug, _, level, _ in ROWS:
        if level == "webhook":
            assert told & {slug, *all_symptoms()[slug].covered_by}, number


def test_an_alert_is_claimed_where_there_is_one() -> None:
    """A row followed to its alert has one, or one that covers it."""
    for number, slug, _, level, _ in ROWS:
        if level in INJECTED:
            found = all_symptoms()[slug]
            assert found.entries or found.covered_by, number


def test_the_numbers_in_the_text() -> None:
    """What the text counts is what the table has."""
    levels = Counter(level for _, _, _, level, _ in ROWS)
    injected = sum(levels[level] for level in INJECTED)
    of_commands = sum(levels[level] for level in OF_COMMANDS)
    assert (
        f"Alerts cover {len(ROWS) - of_commands} rows. Injected faults prove {injected} of" in TEXT
    )
    assert f"{levels['webhook']} up to the webhook" in TEXT
    assert of_commands == 7
    for _, slug, _, level, _ in ROWS:
        if level in OF_COMMANDS:
            assert f"`{slug}`" in TEXT.split("| row |", maxsplit=1)[0], slug
