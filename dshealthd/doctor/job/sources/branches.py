"""Compound commands of a shell, and which of their branches run as far as their tests say."""

from __future__ import annotations

import contextlib
import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.job.sources import expansion

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.expansion import Variables

_DEFAULT = re.compile(r"\$\{\w+:?[-+=?]")
HEADS = frozenset({"for", "case", "select"})
"""Keywords whose own words are no command."""
OPENS = frozenset({"if", "while", "until", "{", *HEADS})
_COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    **{f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
"""How tests compare texts, and with a dash numbers (bash(1), CONDITIONAL EXPRESSIONS)."""
_ALWAYS = {"true": True, ":": True, "false": False}
LOOPS = frozenset({"for", "while", "until"})
CLOSES = frozenset({"fi", "done", "esac", "}"})
KEYWORDS = frozenset({"then", "elif", "else", "do", "!", "time", *OPENS, *CLOSES})


@dataclass(slots=True)
class CompoundCommand:
    """A compound command that is open."""

    keyword: str
    runs: bool | None = None
    """Whether the branch that is read runs; None if that is not known, or its condition is read."""
    others: bool | None = False
    """Whether one of the branches above runs."""
    tests: list[bool | None] = field(default_factory=list)
    """What the commands of its condition say."""
    subject: str = expansion.UNKNOWN
    """What a `case` compares with its patterns."""
    patterns: list[str] | None = None
    """The patterns of a branch of `case`, while they are read."""

    def enter(self, keyword: str) -> None:
        """Read its next branch, or the condition of that."""
        if keyword == "elif":
            self.runs, self.tests = None, []
        elif keyword == "!":
            self.tests.append(None)
        elif keyword == "then":
            self._enter(self.tests[0] if len(self.tests) == 1 else None)
        elif keyword == "else":
            self._enter(says=True)

    def _enter(self, says: bool | None) -> None:  # noqa: FBT001 - three values
        """Read a branch whose own condition says this."""
        self.runs = False if self.others or says is False else says
        self.runs = None if self.others is None and self.runs else self.runs
        self.others = self.others or self.runs

    def takes(self, words: Sequence[str], end: str) -> bool:
        """Return whether these words before an operator are of a pattern."""
        was = self.patterns is not None
        if self.patterns is not None:
            self.patterns += words
            if ")" in end:
                known = "$" not in "".join((self.subject, *self.patterns))
                matches = any(fnmatch.fnmatchcase(self.subject, one) for one in self.patterns)
                self._enter(matches if known else None)
                self.patterns = None
        if self.keyword == "case" and (";;" in end or ";&" in end):
            self.patterns = []
        return was


def tested(words: Sequence[str], variables: Variables) -> bool | None:
    """Return what a test of known texts says; None for another."""
    names = {match["name"] for word in words for match in expansion.VARIABLE.finditer(word)}
    if words[0] in _ALWAYS:
        return _ALWAYS[words[0]]
    if words[0] == "let":
        value = expansion.computed(" ".join(expansion.expanded(words[-1], variables)), variables)
        return None if "$" in value else value != "0"
    if words[0] not in {"[", "[[", "test"} or any(
        _DEFAULT.search(word) and not names <= variables.keys() for word in words
    ):
        return None  # the environment may have what it has a default for
    last = len(words) - (words[0] != "test")
    found = [one for word in words[1:last] for one in expansion.expanded(word, variables)]
    if len(found) != last - 1 or any("$" in word for word in found):
        return None
    match found:
        case ["-n" | "-z" as kind, text]:
            return bool(text) == (kind == "-n")
        case [one, kind, other] if kind in _COMPARES and not re.search(r"[*?\[]", other):
            number = int if kind.startswith("-") else str
            with contextlib.suppress(ValueError, ArithmeticError):
                return _COMPARES[kind](number(one), number(other))
    return None
