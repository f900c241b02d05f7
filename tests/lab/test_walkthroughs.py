"""The walk-throughs of docs/walkthroughs.md lead where they say."""

from __future__ import annotations

import re

import pytest

from tests.lab import walkthroughs
from tests.web.browser import CHROMIUM


@pytest.mark.parametrize(
    "panel", [walkthroughs.ALERTS_PANEL, walkthroughs.HUNG_PANEL, walkthroughs.CAUSE_PANEL]
)
def test_queries_are_the_panels_own(panel: tuple[str, str]) -> None:
    """What is asked by dashboard stands in the shipped dashboards, and its variables are filled."""
    asked = walkthroughs.query_of(panel, node="node-17")
    assert not re.search(r"\0", asked)
    if panel == walkthroughs.ALERTS_PANEL:
        assert 'node="node-17"' in asked


@pytest.mark.lab
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
def test_each_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Page, shell and query name GPU or rank; what each took is printed."""
    assert walkthroughs.main() == 0
    printed = capsys.readouterr().out
    print(printed)
    assert "hang: dashboard's query, names rank" in printed
