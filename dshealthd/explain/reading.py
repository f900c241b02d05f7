"""The general reading of a log: what its processes say at their end, whether a pattern knows it or not.

A healthy log repeats itself: steps, and lines of level INFO. A remark on a failure counts as long as
that chatter does not go on after it. Of the remarks that count, content explains more than a wrapper,
and the first of equals comes before those that follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.explain import remarks
from dshealthd.explain.events import Event
from dshealthd.explain.remarks import Remark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dshealthd.explain.case import Case
    from dshealthd.explain.events import Place

MAX_SHAPES = 300
"""Maximum number of different remarks kept of a file; the latest ones are those near its end."""
CHATTER = 3
"""Times that a remark is made, with healthy lines in between, that show it to be chatter."""
WORTH_READING = 3
"""Lines that somebody can be asked to read."""
PATTERN = "child-failed/stated"
STEP = (
    (
        "read {log} around line {line}; if that does not explain it, look the message up in the "
        "documentation and the issues of the program that printed it"
    ),
)


@dataclass(slots=True)
class Statement:
    """A remark, where it was made, and what came before and after it."""

    remark: Remark
    event: Event
    calm: int
    """Healthy lines of the file before its last occurrence."""
    first_calm: int


class Statements:
    """Collector of the remarks in one file."""

    def __init__(self) -> None:
        self._kept: dict[str, Statement] = {}
        self._open: Statement | None = None
        """A remark that ends in a colon, so that the next line is its content."""

    def __iter__(self) -> Iterator[Statement]:
        """Iterate over the statements in the order of their last occurrence."""
        return iter(self._kept.values())

    def forget(self, usual: Statements) -> None:
        """Drop the remarks that a healthy run makes, too."""
        for template in usual._kept:
            self._kept.pop(template, None)

    def again(self, template: str, place: Place, order: int, calm: int) -> bool:
        """Count a remark that a line of the same template has made before; return whether it has."""
        kept = self._kept.pop(template, None)
        if kept is None:
            return False
        kept.event.count += 1
        kept.event.last, kept.event.last_order = place, order
        kept.calm = calm
        self._kept[template] = kept
        return True

    def add(self, template: str, remark: Remark, event: Event, calm: int) -> None:
        """Keep a remark; `template` is its line without digits."""
        if len(self._kept) >= MAX_SHAPES:
            del self._kept[next(iter(self._kept))]
        self._kept[template] = kept = Statement(remark, event, calm, calm)
        self._open = kept if remark.content.endswith(":") else None

    def follow(self, text: str, place: Place) -> bool:
        """Give the next line of the file; return whether it is the content of a remark before it."""
        opened, self._open = self._open, None
        if opened is None or not (text := text.strip()) or text[-1] == ":":
            return False
        opened.remark = Remark(
            opened.remark.weight,
            f"{opened.remark.content} {text}"[: remarks.MAX_CONTENT],
            wraps=False,
        )
        opened.event.says = opened.remark.content
        opened.event.place = place
        return True


def standing(case: Case) -> list[Statement]:
    """Return the remarks that nothing healthy follows, those that explain most first."""
    found = []
    for facts in case.found.sources:
        for kept in facts.statements:
            event, weight = kept.event, kept.remark.weight
            if weight < remarks.SAYS or event.last_order < facts.finished:
                continue
            later = facts.progress - event.progress
            calm = facts.calm - kept.calm
            if later >= case.enough or calm >= case.enough:
                continue
            if weight == remarks.SAYS and (
                facts.alive > event.last_order
                or (
                    event.count >= CHATTER
                    and (kept.calm > kept.first_calm or remarks.is_kernel(event.place.quote))
                )
            ):
                continue
            found.append(kept)
    times = {id(kept): case.when(kept.event) for kept in found}
    return sorted(
        found,
        key=lambda kept: (
            kept.remark.wraps,
            -kept.remark.weight,
            times[id(kept)] is None,
            times[id(kept)] or 0.0,
            kept.event.origin.source,
            kept.event.order,
        ),
    )


def cause(found: Sequence[Statement], *, confirmed: bool) -> Event | None:
    """Return the remark that is the cause; None if none says what happened.

    `confirmed` is whether something else shows that the job failed.
    """
    if not found or found[0].remark.wraps:
        return None
    confirmed = confirmed or any(kept.remark.weight == remarks.STATES for kept in found)
    return found[0].event if confirmed else None


def worth_reading(found: Sequence[Statement]) -> list[Event]:
    """Return the few remarks that deserve to be read, in their order."""
    return sorted((kept.event for kept in found[:WORTH_READING]), key=lambda event: event.order)
