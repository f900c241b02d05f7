"""Literals: texts of which every match of a regular expression contains at least one.

A line is searched for them first, which costs a tenth of the expression itself.
"""

from __future__ import annotations

import importlib
from typing import Any

_parser: Any = importlib.import_module("re._parser")
"""The parser that `re` itself uses; there is no public access to a parsed expression."""
MIN_LENGTH = 3


def required(pattern: str) -> tuple[str, ...]:
    """Return the literals an expression requires; empty if none has MIN_LENGTH characters."""
    found = _best(_parser.parse(pattern))
    if not found or min(map(len, found)) < MIN_LENGTH:
        return ()
    return tuple(sorted(shortest(found)))


def shortest(found: set[str]) -> set[str]:
    """Return the literals without those that contain another one."""
    kept: list[str] = []
    for text in sorted(found, key=len):
        if not any(map(text.__contains__, kept)):
            kept.append(text)
    return set(kept)


def _best(items: Any) -> set[str]:
    """Return the literals of that part of a sequence whose shortest literal is the longest."""
    candidates: list[set[str]] = []
    run = ""

    def end() -> None:
        nonlocal run
        if run:
            candidates.append({run})
        run = ""

    for operation, value in items:
        name = str(operation)
        if name == "LITERAL":
            run += chr(value)
            continue
        end()
        if name == "SUBPATTERN":
            candidates.append(_best(value[3]))
        elif name == "BRANCH":
            branches = [_best(branch) for branch in value[1]]
            candidates.append(set().union(*branches) if all(branches) else set())
        elif name.endswith("_REPEAT") and value[0] >= 1:
            candidates.append(_best(value[2]))
    end()
    return max(candidates, key=lambda found: min(map(len, found), default=0), default=set())
