"""Names of nodes, and Slurm's lists of them, such as `gpu[001-128,130],login1`, expanded.

Source: hostlist.c of Slurm; `scontrol show hostnames` expands the same.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections.abc import Iterable

MAX_NAMES = 65_536
"""Maximum number of names in one expression; Slurm's own limit is the same."""

MAX_NAME = 253
QUOTED = 60
"""Characters of configured text in a message."""
_MAX_DIGITS = 9

_NAME = re.compile(r"(?=[^A-Za-z0-9]*[A-Za-z0-9])[A-Za-z0-9_.:][A-Za-z0-9_.:-]*")
_ITEM = re.compile(r"(?:\[[^\[\]]*\]|[^\[\],\s])+")
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


def numeric(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a name is; None for a host name."""
    try:
        return ipaddress.ip_address(text)
    except (ValueError, ArithmeticError):
        return None


def expand(expression: str, limit: int = MAX_NAMES) -> tuple[str, ...]:
    """Return the names of a host list, in its order.

    Raises HostlistError, also for a duplicate name or an empty list.

    Commas and white space separate items. An item may have several brackets, which multiply; the
    last one varies fastest. A range keeps the width of its first number: `[08-10]` is 08, 09, 10.
    No item is expanded before its size is known.
    """
    names: dict[str, None] = {}
    total = 0
    if not {"[", "]"}.isdisjoint(_ITEM.sub("", expression)):
        raise HostlistError(f"{quote(expression)} has nested brackets or an unmatched one")
    for item in _ITEM.findall(expression):
        texts = _BRACKETS.split(item)
        numbers = [_ranges(text, item) for text in texts[1::2]]
        total += math.prod(sum(len(values) for values, _ in ranges) for ranges in numbers)
        if total > limit:
            raise HostlistError(f"{quote(item)} expands to more than {limit} names")
        axes = [[text] for text in texts]
        axes[1::2] = [[f"{n:0{width}}" for values, width in one for n in values] for one in numbers]
        for parts in itertools.product(*axes):
            name = "".join(parts)
            if not is_name(name):
                raise HostlistError(f"{quote(name)} is not a valid node name")
            if name in names:
                raise HostlistError(f"{quote(name)} is a duplicate")
            names[name] = None
    if not names:
        raise HostlistError("names no node")
    return tuple(names)


def quote(text: str) -> str:
    """Return at most 60 characters of configured text, in quotes and printable."""
    shown = text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."
    return ascii(shown).replace("'", '"')


def _ranges(text: str, item: str) -> list[tuple[range, int]]:
    """Return the numbers in one pair of brackets of an item, each range with its width."""
    found = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        last = high if dash else low
        if not all(
            number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS
            for number in (low, last)
        ):
            message = f"{quote(part)} in {quote(item)} is neither a number nor a range of numbers"
            raise HostlistError(message)
        if int(last) < int(low):
            raise HostlistError(f"{quote(part)} in {quote(item)} is a descending range")
        found.append((range(int(low), int(last) + 1), len(low)))
    return found
