"""Statements: the remarks that one file makes, each with what came before and after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dshealthd.explain.events import Event, Origin, Place
from dshealthd.explain.remarks import EVENT, WENT_ON, Remark

MAX_SHAPES = 300
"""Maximum number of different remarks kept of a file; the latest ones are those near its end."""
MAX_ORIGINS = 100
"""Maximum number of processes that are known to have made a remark."""

_TABLE = 20
"""Maximum lines between two rows about one pod: the API server forgets events after an hour."""


@dataclass(slots=True)
class Statement:
    """A remark, where it was made, and what came before and after it."""

    remark: Remark
    event: Event
    first_calm: int
    """Healthy lines of the file before its first occurrence."""
    origins: set[Origin]
    """Who made it, the first ones."""


class Statements:
    """Collector of the remarks in one file."""

    def __init__(self) -> None:
        self._kept: dict[str, Statement] = {}

    def __iter__(self) -> Iterator[Statement]:
        """Iterate over the statements in the order of their last occurrence."""
        return iter(self._kept.values())

    def forget(self, usual: Statements) -> None:
        """Drop the remarks that a healthy run makes, too."""
        for template in usual._kept:
            self._kept.pop(template, None)

    def again(self, template: str, place: Place, order: int, calm: int, origin: Origin) -> bool:
        """Count a remark if a line of the same template has made it before; return whether."""
        kept = self._kept.pop(template, None)
        if kept is None:
            return False
        kept.event.count += 1
        kept.event.last, kept.event.last_order = place, order
        kept.event.calm = calm
        if len(kept.origins) < MAX_ORIGINS:
            kept.origins.add(origin)
        self._kept[template] = kept
        return True

    def settle(self, text: str, order: int) -> None:
        """Drop what a pod failed at if its row of events shows that it got on."""
        if WENT_ON.search(text) is None:
            return
        for template, kept in list(self._kept.items()):
            row = EVENT.search(kept.event.place.quote)
            is_step = row is not None and re.fullmatch(r"Failed\w+", row["reason"]) is not None
            if is_step and order - kept.event.last_order <= _TABLE:
                del self._kept[template]

    def add(self, template: str, remark: Remark, event: Event) -> None:
        """Keep a remark; `template` is its line without digits."""
        if len(self._kept) >= MAX_SHAPES:
            del self._kept[next(iter(self._kept))]
        self._kept[template] = Statement(remark, event, event.calm, {event.origin})
