"""What the judge finds in the scenes of tests/findings/scenes."""

from __future__ import annotations

import re

import pytest

from dshealthd.findings.catalogue import catalogue
from dshealthd.symptoms import all_symptoms
from tests.findings.player import FILES, documents, found, scene, seconds

CASES = [
    pytest.param(document, id=f"{file.stem}: {document['name']}")
    for file in FILES
    for document in documents(file)
]


@pytest.mark.parametrize("document", CASES)
def test_findings_over_time(document: dict[str, object]) -> None:
    """Faults are found after their hold, near misses are not, and findings end with the fault."""
    # YAML
    expected = {seconds(at): sorted(names) for at, names in document["found"].items()}  # type: ignore[attr-defined]
    played = found(scene(document), list(expected))
    assert {at: sorted(names) for at, names in played.items()} == expected


FOUND = {
    re.split("[ ,]", name)[0]
    for file in FILES
    for document in documents(file)
    for names in document["found"].values()
    for name in (each.split(": ", 1)[-1] for each in names)
}
NAMES = [
    finding.name.removeprefix("Dshealthd")
    for symptom in all_symptoms().values()
    for finding in symptom.findings
    # Not about what was read, but about what was not: test_service.py has its scenes.
    if finding.name != "DshealthdCollectorFailing"
]


def test_every_finding_has_its_scenes() -> None:
    """Each finding is found in a scene that also has a moment without it."""
    ends = set()
    for document in (document for file in FILES for document in documents(file)):
        moments = [
            {word for each in names for word in re.split("[ ,]", each)}
            for names in document["found"].values()
        ]
        ends |= set.union(*moments) - set.intersection(*moments)
    assert set(NAMES) - FOUND == set()
    assert set(NAMES) - ends == set()


def test_scenes_name_findings_that_exist() -> None:
    """No scene expects a finding that no rule could yield."""
    assert FOUND - {"CollectorFailing"} <= {name.removeprefix("Dshealthd") for name in catalogue()}
