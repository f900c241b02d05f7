"""The tables in docs/coverage.md: every symptom, its slug and alerts; tests and scenes that
exist.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from dshealthd.symptoms import all_symptoms
from tests import yaml_files
from tests.lab import catalogue, job_faults
from tests.test_fault_table import exists

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (\d+) \| \[([a-z0-9-]+)\]\(runbooks/\2\.md\) \| (.+?) \| .+? \| ([a-z]+) \| (.+) \|$",
    TEXT,
    re.MULTILINE,
)
"""Row, slug, alerts, how far it is followed, tests."""
DAYS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (`[^|]+) \|$", TEXT, re.MULTILINE)
"""What a fleet lives through, what is told of it, scenes."""
HEALTHY = re.findall(
    r"^\| ([^|]+) \| [\d,]+(?: days)? \| ([\d.]+) \| ([\d.]+) \| (`[^|]+) \|$", TEXT, re.MULTILINE
)
"""Of a healthy fleet: a kind, the pages and tickets of all times, a scene."""
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


def test_each_has_its_alerts() -> None:
    """A row's alerts are its symptom's, or of one that covers it, and its tests name them; no row
    that commands alone cover has one.
    """
    for number, slug, alerts, level, tests in ROWS:
        if level in OF_COMMANDS:
            assert alerts == "-", number
            continue
        symptoms = (slug, *all_symptoms()[slug].covered_by)
        known = {entry.name for of in symptoms for entry in all_symptoms()[of].entries}
        files = re.findall(r"`([^`]+)::", tests)
        for name in (f"Dshealthd{alert}" for alert in alerts.split(", ")):
            assert name in known, (number, name)
            # The lab compares symptoms.
            told = any(name in (ROOT / file).read_text(encoding="utf-8") for file in files)
            assert told or level != "alert", (number, name)


@pytest.mark.parametrize(("day", "told", "scenes"), DAYS)
def test_every_day_is_played(day: str, told: str, scenes: str) -> None:
    """Each scene or test that a day names exists."""
    assert day
    assert told
    check_scenes(scenes)


def check_scenes(scenes: str) -> None:
    """Assert that scenes or tests exist."""
    for shown in scenes.split(" · "):
        match = re.fullmatch(r"`([^`]+)`(?:: (.+))?", shown)
        assert match is not None, shown
        file, beginning = match.groups()
        assert exists(file)
        if beginning is not None:
            assert any(name.startswith(beginning) for name in scenes_of(file)), shown


def test_a_healthy_fleet() -> None:
    """What healthy nodes get is the sum of its kinds, each of them shown, and within what is
    bearable:
    a page and thirty tickets.
    """
    for _, _, _, scenes in HEALTHY:
        check_scenes(scenes)
    pages, tickets = (sum(float(row[column]) for row in HEALTHY) for column in (1, 2))
    assert f"**{pages:g} pages and {tickets:g} tickets**" in TEXT
    assert (pages <= 1, tickets <= 30) == (True, True)
    assert len(HEALTHY) == TEXT.split("| event | times |")[1].count("\n| ")


def test_all_days_are_read() -> None:
    """No row of the table is left out for its form."""
    assert len(DAYS) == TEXT.split("| event | alerts |")[1].split("\n\n")[0].count("\n| ")


def scenes_of(file: str) -> list[str]:
    """Return the names of the scenes in the files of that name."""
    places = (ROOT / folder / file for folder in ("tests/findings/scenes", "tests/symptoms"))
    documents = [yaml_files.load(place) for place in places if place.exists()]
    return [
        scene["name"]
        for document in documents
        for scene in (document if isinstance(document, list) else document["tests"])
    ]


def test_the_numbers_in_the_text() -> None:
    """What the text counts is what the table has."""
    levels = Counter(level for _, _, _, level, _ in ROWS)
    injected = sum(levels[level] for level in INJECTED)
    of_commands = sum(levels[level] for level in OF_COMMANDS)
    assert f"cover {len(ROWS) - of_commands} rows. Injected faults prove {injected} of them" in TEXT
    assert f"{levels['webhook']} up to the webhook" in TEXT
    assert of_commands == 6
    for _, slug, _, level, _ in ROWS:
        if level in OF_COMMANDS:
            assert f"`{slug}`" in TEXT.split("| row |", maxsplit=1)[0], slug
