"""What the judge finds in the scenes of tests/findings/scenes."""

from __future__ import annotations

import pytest

from tests.findings.player import FILES, documents, found, scene, seconds

CASES = [
    pytest.param(document, id=f"{file.stem}: {document['name']}")
    for file in FILES
    for document in documents(file)
]


@pytest.mark.parametrize("document", CASES)
def test_findings_over_time(document: dict[str, object]) -> None:
    """Faults are found after their hold, near misses are not, and findings end with the fault."""
    expected = {seconds(at): sorted(names) for at, names in document["found"].items()}  # type: ignore[attr-defined] # YAML
    played = found(scene(document), list(expected))
    assert {at: sorted(names) for at, names in played.items()} == expected
