"""The options of `dshealthd doctor`."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dshealthd.core.options import Bytes, Section, option

_ACCEPTED = re.compile(
    r"(?P<check>[a-z0-9-]+)(?: (?P<component>.+?))? until (?P<until>\d{4}-\d\d-\d\d): "
    r"(?P<reason>.+)"
)


class Accepted(NamedTuple):
    """A known finding that does not count until a date."""

    check: str
    component: str
    """The part concerned, such as `gpu 3`; empty for all."""
    until: dt.date
    """The last day on which it is accepted."""
    reason: str


def parse_accepted(text: str) -> Accepted:
    """Parse an accepted finding, `CHECK [COMPONENT] until YYYY-MM-DD: REASON`. ValueError."""
    match = _ACCEPTED.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not "CHECK [COMPONENT] until YYYY-MM-DD: REASON"')
    try:
        until = dt.date.fromisoformat(match["until"])
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f'"{text}": {match["until"]} is not a date') from error
    return Accepted(match["check"], match["component"] or "", until, match["reason"])


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Section):
    """`dshealthd doctor`: checks it skips, its own limits, and accepted findings."""

    skip: tuple[str, ...] = option([], "Names of checks to skip.")
    accept: tuple[str, ...] = option(
        [],
        'Known findings to ignore until a date: "CHECK [COMPONENT] until YYYY-MM-DD: REASON", '
        'such as "gpu-memory gpu 3 until 2026-12-31: replacement is ordered".',
    )
    open_files: int = option(
        4096,
        "Soft limit on open files below which a node with GPUs gets a warning; ranks with data "
        "loaders exceed the usual limit of 1024.",
        minimum=1,
    )
    locked_memory_bytes: Bytes = option(
        Bytes.parse("1GiB"),
        "Limit on locked memory below which a node with InfiniBand gets a warning; RDMA pins "
        "its buffers.",
        minimum=0,
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each option of `doctor` whose value is invalid, and why."""
        for text in self.accept:
            try:
                parse_accepted(text)
            except (ValueError, ArithmeticError) as error:
                yield "accept", str(error)

    def accepted(self) -> tuple[Accepted, ...]:
        """Return the findings that the configuration accepts."""
        return tuple(parse_accepted(text) for text in self.accept)
