"""What several lines together say about one fault."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dshealthd.explain.patterns import said

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.explain.events import Event

NEAR = 50
"""Lines within which two messages may be about one fault."""


def merge(events: Sequence[Event]) -> None:
    """Join what several lines say about one fault: they share a file and a symptom, and agree.

    A kernel's OOM kill takes two lines, srun and slurmstepd each print one, and an assertion in a
    kernel has no rank, while the exception that follows from it has.
    """
    groups: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.role in {"cause", "confirmation"} and event.layer in {"hardware", "program"}:
            groups[event.origin.source, event.slug].append(event)
    for about in groups.values():
        first = about[0]
        for event in about[1:]:
            if event.order - first.last_order > NEAR or not _agree(first, event):
                first = event
                continue
            if first.role == "confirmation":  # it names the device of what follows
                event.fields = {**first.fields, **event.fields}
                event.says = said(event.texts, event.fields)
                first = event
                continue
            if event.pattern == first.pattern and event.fields != first.fields:
                first.fields = {**event.fields, **first.fields}
                first.says = said(first.texts, first.fields) + first.whence
            first.host = first.host or event.host
            first.last_order = event.last_order
            if first.rank is None:
                first.rank, first.ranks = event.rank, event.ranks
        ranked = [event for event in about if event.rank is not None]
        if len({event.rank for event in ranked}) == 1:
            for event in about:
                if event.rank is None and _agree(event, ranked[0]):
                    event.rank = ranked[0].rank


def are_near(one: Event, other: Event) -> bool:
    """Return whether two events are so near in one file that they may be about one fault."""
    is_same = one.origin.source == other.origin.source
    return is_same and abs(one.last_order - other.last_order) <= NEAR


def _agree(one: Event, other: Event) -> bool:
    """Return whether two events may be one: no value, rank or host that both have differs."""
    shared = one.fields.keys() & other.fields.keys()
    return (
        all(one.fields[name] == other.fields[name] for name in shared)
        and (one.rank is None or other.rank is None or one.rank == other.rank)
        and (one.host is None or other.host is None or one.host == other.host)
    )
