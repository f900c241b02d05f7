"""Finder of the lines in a block that may match a pattern, by a cache of seen lines."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TEMPLATE = 1 << 10
"""Maximum bytes of a remembered line; longer ones are searched each time."""
MAX_REMEMBERED = 1 << 23
"""Maximum bytes of all remembered lines; beyond it, all are forgotten."""
_OVERHEAD = 120
"""Bytes that Python needs for one more entry."""
_DIGITS = b"0123456789"


class Templates:
    """Finder that searches each line for literals unless it has seen it before, ignoring digits.

    A training job prints few distinct lines, with different numbers, so nearly all lines cost one
    dictionary look-up.
    """

    def __init__(self, literals: Sequence[str]) -> None:
        bare = {literal.encode().translate(None, _DIGITS) for literal in literals}
        self._literals = sorted(bare, key=len)
        self._is_hot: dict[bytes, bool] = {}
        self._size = 0

    def __call__(self, block: bytes) -> Sequence[int]:
        """Return the offsets of the lines that hold a literal."""
        templates = block.translate(None, _DIGITS).split(b"\n")
        known = self._is_hot
        told = list(map(known.get, templates))
        if told.count(False) == len(told):
            return ()
        lengths = map(len, block.split(b"\n"))
        starts = [0, *accumulate(length + 1 for length in lengths)]
        found = []
        for number, (template, hot) in enumerate(zip(templates, told, strict=True)):
            if hot is None:
                hot = known.get(template)  # noqa: PLW2901 - learnt in this block
                if hot is None:
                    hot = self._learn(template)  # noqa: PLW2901
            if hot:
                found.append(starts[number])
        return found

    def _learn(self, template: bytes) -> bool:
        hot = any(map(template.__contains__, self._literals))
        if len(template) <= MAX_TEMPLATE:
            self._size += len(template) + _OVERHEAD
            if self._size > MAX_REMEMBERED:
                self._is_hot.clear()
                self._size = len(template) + _OVERHEAD
            self._is_hot[template] = hot
        return hot
