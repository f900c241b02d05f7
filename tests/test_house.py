"""What `make check` shows of how the product is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import house

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TEXT = '''"""A docstring
of two lines."""

import os  # for the path
from sys import (
    argv,
)

# A comment.
TABLE = """one
two"""


def run():
    """Another."""
    return os, argv, TABLE
'''


def test_lines_of_code_are_counted() -> None:
    """Neither docstrings nor comments nor blank lines are code; a string that is a value is."""
    assert sorted(house.code(TEXT)) == [4, 5, 6, 7, 10, 11, 14, 16]
    assert house.imports(TEXT) == 4


def test_small_modules_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small module is named unless there is a reason for it; so is the share of imports."""
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    monkeypatch.setattr(house, "KEPT", {"kept/": "a reason"})
    (tmp_path / "kept").mkdir()
    for name in ("small.py", "kept/other.py", "__init__.py"):
        (tmp_path / name).write_text(TEXT, encoding="utf-8")
    (tmp_path / "large.py").write_text("x = 1\n" * house.FEWEST, encoding="utf-8")
    house.main()
    said = capsys.readouterr().out
    assert "  8 small.py\n" in said
    assert "large.py" not in said
    assert "other.py" not in said
    assert "Imports are 12.9% of the lines; aim at 7%" in said
