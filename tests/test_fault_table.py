"""The tables of faults and attacks in docs/faults.md: complete, and of tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAULTS = 66
_DOCUMENT = (ROOT / "docs/faults.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", _DOCUMENT, re.MULTILINE)
ATTACKS = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|$", _DOCUMENT, re.MULTILINE)


def test_every_fault_has_a_row() -> None:
    """The faults are numbered without a gap, and each names a test."""
    assert [int(number) for number, _, _ in ROWS] == list(range(1, FAULTS + 1))
    assert all("::test_" in tests for _, _, tests in ROWS)


def test_every_test_exists() -> None:
    """Each test that is named is a function of that file; each scene is a file of scenes."""
    assert len(ATTACKS) == _DOCUMENT.count("\n| ") - len(ROWS) - len(("fault", "attack"))
    for what, tests in (*((number, tests) for number, _, tests in ROWS), *ATTACKS):
        for name in re.findall(r"`([^`]+)`", tests):
            assert exists(name), (what, name)


def exists(name: str) -> bool:
    """Tell whether a test, as `FILE::FUNCTION`, or a file of scenes exists."""
    file, _, function = name.partition("::")
    if not function:
        folders = ("tests/symptoms", "tests/findings/scenes")
        return any((ROOT / folder / file).exists() for folder in folders)
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, functions) and node.name == function for node in tree.body)
