"""`dshealthd evidence` without `--job`."""

from __future__ import annotations

import pytest

from dshealthd.evidence.command import only


@pytest.mark.parametrize(
    ("jobs", "meant"), [((), None), (("run-1",), "run-1"), (("run-1", "run-2"), None)]
)
def test_the_only_job_needs_no_name(jobs: tuple[str, ...], meant: str | None) -> None:
    """The only job of a node is meant where none is named; of several, none more than another."""
    assert only(jobs) == meant
