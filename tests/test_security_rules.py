"""Bandit's rules hold for all that is shipped, and each exception says why."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHIPPED = ("dshealthd", "deploy", "grafana")
EXCEPTION = re.compile(r"# noqa: [A-Z0-9, ]*\bS\d{3}\b(?P<rest>.*)")


def exceptions() -> list[tuple[str, str]]:
    """Return place and reason of each exception, behind it or in a comment above it."""
    found = []
    for folder in SHIPPED:
        for file in sorted((ROOT / folder).rglob("*.py")):
            lines = file.read_text().splitlines()
            for number, (above, line) in enumerate(pairwise(["", *lines]), 1):
                if match := EXCEPTION.search(line):
                    reason = re.sub(r"^ *# ", " - ", above) if re.match(" *# ", above) else ""
                    found.append((f"{file.relative_to(ROOT)}:{number}", match["rest"] or reason))
    return found


def test_each_exception_has_a_reason() -> None:
    """There are some, and none without a few words behind the rule."""
    assert len(exceptions()) > 10
    assert [place for place, rest in exceptions() if not re.search(r" - \w+ ?\w*", rest)] == []


def test_the_rules_are_on() -> None:
    """All rules are chosen, and bandit's are not taken back for what is shipped."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert lint["select"] == ["ALL"]
    ignored = [*lint.get("ignore", [])]
    for files, rules in lint["per-file-ignores"].items():
        if files.split("/")[0] in SHIPPED:
            ignored += rules
    assert not [rule for rule in ignored if re.fullmatch(r"S\d*", rule)]


def test_other_exceptions_are_seen() -> None:
    """The pattern finds a bare one."""
    match = EXCEPTION.search("x()  # noqa: S603")
    assert match is not None
    assert not match["rest"]
