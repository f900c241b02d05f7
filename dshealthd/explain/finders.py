"""Finders of places in a block that may match a pattern: Hyperscan, or a cache of seen lines."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dshealthd.explain import compiled

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


class Hyperscan:
    """Finder that searches for all literals at once, with Intel's library from the extra `explain`."""

    def __init__(self, literals: Sequence[str], *, keep: bool = False) -> None:
        """Load or compile the literals; with `keep`, use the user's cache."""
        self._database = _compiled(tuple(literals), keep=keep)

    def __call__(self, block: bytes) -> Sequence[int]:
        """Return the offsets of the last bytes of all literals found."""
        found: list[int] = []

        def matched(_id: int, _start: int, end: int, _flags: int, _context: object) -> None:
            found.append(end - 1)

        self._database.scan(block, match_event_handler=matched)
        return found


@functools.cache
def _compiled(literals: tuple[str, ...], *, keep: bool) -> Any:
    """Return the compiled database; with `keep`, that of an earlier run if there is one.

    Compiling takes 30 MiB of memory and as long as searching 50 MB.
    """
    import hyperscan

    if not keep:
        return _made(hyperscan, literals)
    told = "\0".join((importlib.metadata.version("hyperscan"), *literals))
    name = f"literals-{hashlib.sha256(told.encode()).hexdigest()[:32]}"
    with contextlib.suppress(compiled.NotKept, hyperscan.HyperscanError):  # none, or another CPU's
        database = hyperscan.loadb(compiled.load(name), mode=hyperscan.HS_MODE_BLOCK)
        database.scratch = hyperscan.Scratch(database)
        return database
    database = _made(hyperscan, literals)
    with contextlib.suppress(compiled.NotKept):  # then the next run compiles it again
        compiled.save(name, hyperscan.dumpb(database))
    return database


def _made(hyperscan: Any, literals: tuple[str, ...]) -> Any:
    """Compile the literals as literals: as expressions they take twice as long."""
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    expressions = [literal.encode() for literal in literals]
    database.compile(
        expressions=expressions,
        ids=list(range(len(expressions))),
        elements=len(expressions),
        flags=[0] * len(expressions),
        literal=True,
    )
    return database
