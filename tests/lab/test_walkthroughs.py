"""The walk-throughs of docs/walkthroughs.md lead where they say."""

from __future__ import annotations

import shutil

import pytest

from tests.lab import walkthroughs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on this machine")
def test_each_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Page, shell and query name GPU or rank; what each took is printed."""
    assert walkthroughs.main() == 0
    assert "hang: dashboard's query" in capsys.readouterr().out
