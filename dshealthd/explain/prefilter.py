"""Prefilter: which few of the patterns can match a text at all, from a single scan of it.

Each pattern has a `Need`, worked out from its expression: the literals without which it cannot
match. Texts are compared without their digits, as most lines differ from others only in these.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_parser: Any = importlib.import_module("re._parser")
"""The parser that `re` itself uses; there is no public access to a parsed expression."""
MIN_LENGTH = 3
"""Minimum characters of a literal: shorter ones are in nearly every line."""
MAX_STRINGS = 16
"""Maximum number of wordings of a part of an expression that are searched for as a whole."""
_DIGITS = b"0123456789"
_COMMON = " etaoinsrlhdcumpfgybvwk-.:/,_'\"=()[]"
"""The characters of English and of logs, the most frequent first; all others are rare."""
_COSTS = {character: 1 / number for number, character in enumerate(_COMMON, 1)}
_SHOWS, _MOST = 4, 8
"""Characters of a literal that are searched for: fewer are found too often; more find no less, and
take longer to compile."""


def bare(text: str) -> str:
    """Return a text without its digits; `str.translate` would take ten times as long."""
    return (
        text.encode("utf-8", "surrogatepass")
        .translate(None, _DIGITS)
        .decode("utf-8", "surrogatepass")
    )


class Need(NamedTuple):
    """What is in each text that an expression matches, digits aside."""

    every: tuple[str, ...] = ()
    """All of these."""
    wordings: tuple[tuple[str, ...], ...] = ()
    """One of each group."""
    groups: tuple[tuple[Need, ...], ...] = ()
    """What one member of each group needs."""

    def fits(self, text: str) -> bool:
        """Return whether a text without digits has all of it."""
        has = text.__contains__
        return (
            all(map(has, self.every))
            and all(any(map(has, literals)) for literals in self.wordings)
            and all(any(need.fits(text) for need in group) for group in self.groups)
        )

    @property
    def anchors(self) -> frozenset[str]:
        """The literals of which a text has at least one; empty if none is required.

        Of several such sets, it is the one whose shortest literal is longest.
        """
        sets = [frozenset({literal}) for literal in self.every]
        sets += map(frozenset, self.wordings)
        for group in self.groups:
            members = [need.anchors for need in group]
            if all(members):
                sets.append(frozenset().union(*members))
        return max(sets, key=lambda found: min(map(len, found)), default=frozenset())


def needed(expression: str) -> Need:
    """Return what each match of an expression contains."""
    parsed = _parser.parse(expression)
    return Need() if parsed.state.flags & re.IGNORECASE else _needed(parsed)


def _needed(items: Any) -> Need:
    every: list[str] = []
    wordings: list[tuple[str, ...]] = []
    groups: list[tuple[Need, ...]] = []
    run = {""}
    for item in [*items, None]:
        more = None if item is None else _strings([item])
        if more is not None and len(run) * len(more) <= MAX_STRINGS:
            run = {first + second for first in run for second in more}
            continue
        literals = sorted(_shortest(map(bare, run)))
        if len(min(literals, key=len)) >= MIN_LENGTH:
            if len(literals) == 1:
                every += literals
            else:
                wordings.append(tuple(literals))
        run = more or {""}
        if item is None or more is not None:
            continue
        name, value = str(item[0]), item[1]
        inner = Need()
        if name == "SUBPATTERN" and not value[1] & re.IGNORECASE:
            inner = _needed(value[3])
        elif name.endswith("_REPEAT") and value[0] >= 1:
            inner = _needed(value[2])
        elif name == "BRANCH":
            branches = tuple(map(_needed, value[1]))
            if Need() not in branches:
                groups.append(branches)
        every += inner.every
        wordings += inner.wordings
        groups += inner.groups
    return Need(tuple(every), tuple(wordings), tuple(groups))


def _strings(items: Any) -> set[str] | None:
    """Return all strings that a part of an expression matches; None if they are too many."""
    found = {""}
    for operation, value in items:
        name = str(operation)
        more: set[str] | None = None
        if name == "LITERAL":
            more = {chr(value)}
        elif name in {"AT", "ASSERT", "ASSERT_NOT"}:
            more = {""}
        elif name == "SUBPATTERN" and not value[1] & re.IGNORECASE:
            more = _strings(value[3])
        elif name == "IN" and all(str(kind) == "LITERAL" for kind, _ in value):
            more = {chr(code) for _, code in value}
        elif name.endswith("_REPEAT") and value[:2] == (0, 1):
            more = _strings(value[2])
            more = None if more is None else more | {""}
        elif name == "BRANCH":
            branches = [one for branch in value[1] if (one := _strings(branch)) is not None]
            if len(branches) == len(value[1]):
                more = set().union(*branches)
        if more is None or len(found) * len(more) > MAX_STRINGS:
            return None
        found = {first + second for first in found for second in more}
    return found


def _shortest(found: Iterable[str]) -> set[str]:
    """Return the literals without those that contain another one."""
    kept: list[str] = []
    for text in sorted(found, key=len):
        if not any(map(text.__contains__, kept)):
            kept.append(text)
    return set(kept)


def _cost(character: str) -> float:
    """Return about how often a character begins a futile comparison."""
    return _COSTS.get(character, 1 / 100)


class Prefilter:
    """Searcher for the needs that a text meets.

    `re` skips quickly over characters that begin no literal, so each literal is searched for from
    its rarest character on, and few different characters begin them all.
    """

    def __init__(self, needs: Sequence[Need]) -> None:
        """Prepare to search for needs, which are known by their number."""
        self._needs = needs
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, need in enumerate(needs):
            for literal in need.anchors:
                numbers[literal].append(number)
        firsts: set[str] = set()
        # Those with the least choice choose first, so that the others may share their choice.
        for literal in sorted(numbers, key=_least, reverse=True):
            if firsts.isdisjoint(_starts(literal)):
                firsts.add(min(_starts(literal), key=_cost))
        parts: dict[str, set[str]] = defaultdict(set)
        for literal in numbers:
            starts = _starts(literal)
            begin = min(
                (place for place, first in enumerate(starts) if first in firsts),
                key=lambda place: _cost(starts[place]),
            )
            parts[literal[begin : begin + _MOST]].add(literal)
        self._numbers = dict(numbers)
        # The longest part is found at a place, so it stands for those that it begins with.
        self._literals = {
            part: sorted(
                {one for end in range(len(part)) for one in parts.get(part[: end + 1], ())}
            )
            for part in list(parts)
        }
        self._search = re.compile(alternation(parts)).search if parts else None

    def find(self, text: str) -> list[int]:
        """Return the numbers of the needs that a text without digits meets, in ascending order."""
        if self._search is None or (match := self._search(text)) is None:
            return []
        parts = set()
        while match is not None:
            parts.add(match[0])
            match = self._search(text, match.start() + 1)
        numbers = {
            number
            for part in parts
            for literal in self._literals[part]
            if literal in text
            for number in self._numbers[literal]
        }
        return sorted(number for number in numbers if self._needs[number].fits(text))


def _starts(literal: str) -> str:
    return literal[: max(1, len(literal) - _SHOWS + 1)]


def _least(literal: str) -> tuple[float, str]:
    return min(map(_cost, _starts(literal))), literal


def alternation(words: Iterable[str]) -> str:
    """Return an expression for the longest of some words at a place, which shares their beginnings.

    `re` tries alternatives one after another; of these, at most one begins with the right
    character.
    """
    rests: dict[str, set[str]] = defaultdict(set)
    ends = False
    for word in words:
        if word:
            rests[word[0]].add(word[1:])
        else:
            ends = True
    if not rests:
        return ""
    branches = "|".join(re.escape(first) + alternation(rests[first]) for first in sorted(rests))
    return f"(?:{branches})" + "?" * ends if ends or len(rests) > 1 else branches
