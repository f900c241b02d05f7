"""Names of nodes, and Slurm's lists of them, such as `gpu[001-128,130],login1`, expanded.

Source: hostlist.c of Slurm; `scontrol show hostnames` expands the same.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_NAMES = 65_536
"""Maximum number of names in one expression; Slurm's own limit is the same."""

MAX_NAME = 253
QUOTED = 60
"""Characters of configured text in a message."""
_MAX_DIGITS = 9
_MAX_BRACKETS = 8

_NAME = re.compile(r"(?=[^A-Za-z0-9]*[A-Za-z0-9])[A-Za-z0-9_.:][A-Za-z0-9_.:-]*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


class HostlistError(ValueError):
    """An invalid node list expression; the message quotes at most 60 characters of it."""


class MembershipError(Exception):
    """The members, or their leaves, cannot be determined. `errors` has one line for each problem,
    `FILE:LINE: reason` for one in a file.
    """

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(self.errors))


def is_name(text: str) -> bool:
    """Return whether a list may hold a name: a host name or address of at most 253 ASCII
    characters. Names become labels, parts of `NODE/gpu3` and arguments of a resolver, so this one
    check rejects whatever cannot be the name of a host.
    """
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def expand(expression: str, limit: int = MAX_NAMES) -> tuple[str, ...]:
    """Return the names of a host list, in its order.

    Raises HostlistError, also for a duplicate name or an empty list.

    Commas and white space separate items. An item may have several brackets, which multiply; the
    last one varies fastest. A range keeps the width of its first number: `[08-10]` is 08, 09, 10.
    No item is expanded before its size is known.
    """
    names: dict[str, None] = {}
    total = 0
    for item in _items(expression):
        axes = _axes(item)
        total += math.prod(map(len, axes))
        if total > limit:
            message = f"{quote(item)} expands to more than {limit} names"
            raise HostlistError(message)
        for parts in itertools.product(*axes):
            name = "".join(parts)
            if not is_name(name):
                message = f"{quote(name)} is not a valid node name"
                raise HostlistError(message)
            if name in names:
                message = f"{quote(name)} is a duplicate"
                raise HostlistError(message)
            names[name] = None
    if not names:
        message = "names no node"
        raise HostlistError(message)
    return tuple(names)


def quote(text: str) -> str:
    """Return at most 60 characters of configured text, in quotes and printable."""
    shown = text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."
    return ascii(shown).replace("'", '"')


def _items(expression: str) -> list[str]:
    """Split a host list at commas and spaces outside brackets."""
    items, start, depth = [], 0, 0
    for position, character in enumerate(f"{expression},"):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            message = f"{quote(expression[start:])} has nested brackets or an unmatched one"
            raise HostlistError(message)
        if depth == 0 and (character == "," or character.isspace()):
            items.append(expression[start:position])
            start = position + 1
    if depth:
        message = f"{quote(expression[start:])} has a bracket that is not closed"
        raise HostlistError(message)
    return [item for item in items if item]


def _axes(item: str) -> list[_Numbers | tuple[str]]:
    """Return the choices of text for each segment of an item; literal text is a single choice."""
    parts = _BRACKETS.split(item)
    if len(parts) // 2 > _MAX_BRACKETS:
        message = f"{quote(item)} has more than {_MAX_BRACKETS} brackets"
        raise HostlistError(message)
    return [_Numbers(part, item) if index % 2 else (part,) for index, part in enumerate(parts)]


class _Numbers:
    """The numbers of one pair of brackets, generated on iteration."""

    def __init__(self, text: str, item: str) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        for part in text.split(","):
            low, dash, high = part.partition("-")
            last = high if dash else low
            if not all(
                number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS
                for number in (low, last)
            ):
                message = (
                    f"{quote(part)} in {quote(item)} is neither a number nor a range of numbers"
                )
                raise HostlistError(message)
            if int(last) < int(low):
                message = f"{quote(part)} in {quote(item)} is a descending range"
                raise HostlistError(message)
            self._ranges.append((int(low), int(last), len(low)))

    def __len__(self) -> int:
        return sum(high - low + 1 for low, high, _ in self._ranges)

    def __iter__(self) -> Iterator[str]:
        return (
            f"{number:0{width}}"
            for low, high, width in self._ranges
            for number in range(low, high + 1)
        )
