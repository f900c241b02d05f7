"""Templates: the lines of a log without their digits, of which few are distinct."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from dshealthd.explain import input as logs
from dshealthd.explain import remarks
from dshealthd.explain.patterns import GENERIC, load
from dshealthd.explain.streams import ANSI

if TYPE_CHECKING:
    import re

MAX_MATCHED = 2000
"""Maximum characters of a line to match: the time of a pattern may grow with their square."""
MAX_TEMPLATE = 1 << 10
"""Maximum bytes of a remembered line; longer ones are searched each time."""
MAX_REMEMBERED = 1 << 23
"""Maximum bytes of all remembered lines; beyond it, all are forgotten."""
_OVERHEAD = 120
"""Bytes that Python needs for one more entry."""
_DIGIT_BYTES = b"0123456789"
_NEEDS_DIGITS = r"\d"
"""Part of each expression that asks for a digit."""
_Search: TypeAlias = "Callable[[str], re.Match[str] | None]"
_Decision: TypeAlias = "bool | tuple[_Search, ...]"
"""Whether a line may matter; searches of which one must find something, if its digits decide."""


class Templates:
    """Finder that searches each line once for what patterns need, ignoring digits.

    A training job prints few distinct lines, with different numbers, so nearly all lines cost one
    dictionary look-up. The patterns of values that a training loop reports, as of a loss, need
    what its healthy lines have, too: if only these may match, their expressions decide.
    """

    def __init__(self) -> None:
        self._patterns = load()
        self._known: dict[bytes, _Decision] = {}
        self._size = 0

    def __call__(self, block: bytes) -> Sequence[int]:
        """Return the offsets of the lines that may match a pattern."""
        templates = block.translate(None, _DIGIT_BYTES).split(b"\n")
        known = self._known
        decided = list(map(known.get, templates))
        if decided.count(False) == len(decided):
            return ()
        lines = block.split(b"\n")
        starts = [0, *accumulate(len(line) + 1 for line in lines)]
        found = []
        for number, (template, decision) in enumerate(zip(templates, decided, strict=True)):
            if decision is False:
                continue
            if decision is None:
                decision = known.get(template)  # noqa: PLW2901 - learned in this block
                if decision is None:
                    decision = self._learn(template)  # noqa: PLW2901
            if decision is True or (decision and _any_matches(decision, lines[number])):
                found.append(starts[number])
        return found

    def _learn(self, template: bytes) -> _Decision:
        decision = self._decide(template)
        if len(template) <= MAX_TEMPLATE:
            self._size += len(template) + _OVERHEAD
            if self._size > MAX_REMEMBERED:
                self._known.clear()
                self._size = len(template) + _OVERHEAD
            self._known[template] = decision
        return decision

    def _decide(self, template: bytes) -> _Decision:
        every = self._patterns.every
        text = template.decode("utf-8", "replace")
        is_record, is_colored = text.startswith("{"), "\x1b" in text
        if is_colored:
            text = ANSI.sub("", text)
        if is_record:
            text = text.replace('\\"', '"').replace("\\t", "\t")
        numbers = self._patterns.prefilter.find(text)
        if not numbers:
            return False
        known = [number for number in numbers if number < len(every) + len(GENERIC)]
        is_remark = len(known) < len(numbers)
        if is_remark and remarks.may_be(text):
            return True
        searches: list[_Search] = (
            [remarks.ended] if is_remark and remarks.ended(f"{text} 1") else []
        )
        if not known:
            return tuple(searches) or False
        # What patterns see of a record or of a colored line is another text than this one.
        if is_record or is_colored:
            return True
        if any(number >= len(every) or every[number].role != "loss" for number in known):
            return True
        expressions = [every[number].regex for number in known]
        # Without digits, what needs none says the same of every line.
        if any(_NEEDS_DIGITS not in one.pattern and one.search(text) for one in expressions):
            return True
        searches += [one.search for one in expressions if _NEEDS_DIGITS in one.pattern]
        return tuple(searches) or False


def _any_matches(searches: Iterable[_Search], line: bytes) -> bool:
    # A progress bar may have redrawn the line.
    parts = line[: logs.MAX_LINE].decode("utf-8", "replace").split("\r")
    return any(search(part[:MAX_MATCHED]) for search in searches for part in parts)
