"""What Hypothesis draws is the same in every run."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def test_same_examples_whatever_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test draws the same again, also after a module of the project has been imported."""
    drawn: list[tuple[str, int]] = []

    @given(st.text(), st.integers())
    def draw(text: str, number: int) -> None:
        drawn.append((text, number))

    draw()
    before = list(drawn)
    drawn.clear()
    module = types.ModuleType("not_imported_so_far")
    file = tmp_path / "not_imported_so_far.py"
    file.write_text(f"STRANGE = {[(f'strange{n}', 10**9 + 7 * n) for n in range(100)]}")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    draw()
    assert drawn == before
