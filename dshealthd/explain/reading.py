"""The general reading of a log: what its processes say at their end, whether a pattern knows it or
not.

A healthy log repeats itself: steps, and lines of level INFO. A remark on a failure counts as long
as that chatter does not go on after it. Of the remarks that count, content explains more than a
wrapper, and the first of equals comes before those that follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dshealthd.explain import remarks
from dshealthd.explain.case import Case, are_near

if TYPE_CHECKING:
    from dshealthd.explain.events import Event
    from dshealthd.explain.statements import Statement

CHATTER = 3
"""Times that a process makes a remark, with healthy lines in between, that show it to be
chatter."""
WORTH_READING = 3
"""Lines that somebody can be asked to read."""
PATTERN = "child-failed/stated"
_SEARCH = "; if it does not explain itself, search the issues of its program for the message"
STEP = ("`less +{line} {log}` shows what stands around this line" + _SEARCH,
        "read what stands around line {line} of {log}" + _SEARCH)  # fmt: skip


def standing(case: Case, near: Event | None = None) -> list[Statement]:
    """Return the remarks that nothing healthy follows, those that explain most first.

    If an event is given, only those near it in its file, which may be about the same.
    """
    found = []
    for facts in case.found.sources:
        for kept in facts.statements:
            event, weight = kept.event, kept.remark.weight
            if near is not None and not are_near(near, event):
                continue
            if weight < remarks.HINTS or case.ended_well(event):
                continue
            # A warning counts only as the last that a log says, and not after a good end.
            if weight == remarks.HINTS and (facts.calm > event.calm or case.is_done(facts)):
                continue
            later = facts.progress - event.progress
            calm = facts.calm - event.calm
            if later >= case.enough or calm >= case.enough:
                continue
            if weight in {remarks.HINTS, remarks.SAYS} and (
                facts.alive > event.last_order
                or (
                    event.count >= CHATTER * len(kept.origins)
                    and (event.calm > kept.first_calm or event.of_kernel)
                )
            ):
                continue
            found.append(kept)
    return sorted(
        found,
        key=lambda kept: (
            kept.remark.wraps,
            -kept.remark.weight,
            kept.event.time is None,
            kept.event.time or 0.0,
            kept.event.origin.source,
            # The last of Kubernetes' events is what the pod ended of: it outlived those before.
            kept.event.order * (-1 if remarks.is_row(kept.event.place.quote) else 1),
        ),
    )


def cause(case: Case, found: Sequence[Statement], *, confirmed: bool) -> Event | None:
    """Return the remark that is the cause; None if none says what happened.

    Where only wrappers are left, a signal that ended a process says most.

    `confirmed` is whether something else shows that the job failed.
    """
    sources = case.found.sources
    # Where the job worked on, if only for a few lines, nobody knows that it ended of it.
    ending = [
        kept
        for kept in found
        if kept.remark.weight >= remarks.LOGS
        and sources[kept.event.origin.source].alive < kept.event.last_order
    ]
    if not found or found[0].remark.wraps or found[0].remark.weight < remarks.NOTES:
        signaled = [one.event for one in ending if one.event.is_crash or "how" in one.event.fields]
        return min(signaled, key=lambda event: not event.is_crash, default=None)
    # A text that shows nothing at work is one that somebody picked; a kernel complains of much.
    is_picked = found[0].event.layer != "hardware" and not any(
        facts.progress or facts.alive or facts.finished for facts in sources
    )
    return found[0].event if confirmed or ending or is_picked else None


def worth_reading(found: Sequence[Statement]) -> list[Event]:
    """Return the few remarks that deserve to be read, in their order."""
    return sorted((kept.event for kept in found[:WORTH_READING]), key=lambda event: event.order)
