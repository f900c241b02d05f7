"""The table of faults in docs/faults.md: complete, and of tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAULTS = 58
ROWS = re.findall(
    r"^\| (\d+) \| (.+?) \| (.+) \|$", (ROOT / "docs/faults.md").read_text(), re.MULTILINE
)


def test_every_fault_has_a_row() -> None:
    """The faults are numbered without a gap, and each names a test."""
    assert [int(number) for number, _, _ in ROWS] == list(range(1, FAULTS + 1))
    assert all("::test_" in tests for _, _, tests in ROWS)


def test_every_test_exists() -> None:
    """Each test that is named is a function of that file; each scene is a file of scenes."""
    for number, _, tests in ROWS:
        for name in re.findall(r"`([^`]+)`", tests):
            file, _, function = name.partition("::")
            if not function:
                assert (ROOT / "tests/symptoms" / file).exists(), (number, name)
                continue
            tree = ast.parse((ROOT / file).read_text())
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            assert any(
                isinstance(node, functions) and node.name == function for node in tree.body
            ), (number, name)
