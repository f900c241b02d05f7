"""The order of causes: which of several events explains the others.

Layers give it: hardware and the scheduler, the program of a rank, the communication of all ranks,
the launcher. The table says where an event stands otherwise; within a place, time decides.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dshealthd.explain import clocks, remarks

if TYPE_CHECKING:
    from collections.abc import Callable

    from dshealthd.explain.case import Case
    from dshealthd.explain.events import Event

Span: TypeAlias = "tuple[float, float]"
"""The earliest and the latest time at which something may have happened."""
AFTERMATH = 30.0
"""Seconds after broken communication beyond which a program's failure cannot be its cause: gloo and
NCCL notice a closed connection at once."""
BEFORE, AFTER = 900.0, 120.0
"""Seconds before and after the first failure in which a hardware fault may be its cause: a watchdog
waits 600 s, and the kernel log is written a little later than the fault."""
_LAYERS = {
    "hardware": 1,
    "program": 2,
    "communication": 4,
    "loss": 5,
    "scheduler": 6,
    "launcher": 7,
}
NOTHING = 8
"""The place of what cannot be the cause."""


class Rule(NamedTuple):
    """Where an event stands in the order of causes."""

    says: str
    place: int
    applies: Callable[[Event, Case, Span | None], bool]


RULES = (
    Rule(
        "a scheduler's reason, while nothing had failed, explains all that follows", 0,
        lambda event, case, _: (event.layer == "scheduler" or remarks.is_row(event.place.quote))
        and not _comes_after(event, case),
    ),
    Rule(
        "a fault long before or after the first failure has nothing to do with it", NOTHING,
        lambda event, _case, first: event.layer == "hardware"
        and not is_near(event.time, first),
    ),
    Rule(
        "a program's failure after the communication broke follows from that", NOTHING,
        lambda event, case, _: event.layer == "program"
        and event.role != "loss" and _is_aftermath(event, case),
    ),
    Rule(
        "a process that died comes before its peers' errors of communication", 3,
        lambda event, case, _: event.layer == "launcher" and _is_death(event, case),
    ),
)  # fmt: skip
"""The first that applies counts; else an event stands where its layer does."""


def place(event: Event, first: Span | None, case: Case) -> int:
    """Return where an event stands in the order; `first` is when the job first failed."""
    for rule in RULES:
        if rule.applies(event, case, first):
            return rule.place
    return _LAYERS["loss" if event.role == "loss" else event.layer]


def key(event: Event, first: Span | None, case: Case) -> tuple[object, ...]:
    """Return the sort key of a candidate cause: the smallest is the cause."""
    # Who sends a signal has a reason.
    is_signal = event.layer == "scheduler" and event.signal > 0
    where, weak = place(event, first, case), event.weak or is_signal
    is_program = where == _LAYERS["program"]
    return (
        where, weak and not is_program, not event.first,
        _is_of_others(event), weak and (event.bare or event.is_hollow),
        event.time is None, event.time or 0.0, weak, event.origin.source, event.order,
    )  # fmt: skip


def explains(root: Event, other: Event) -> bool:
    """Return whether one event is of a layer that explains another's."""
    return _LAYERS[other.layer] > _LAYERS[root.layer]


def is_near(when: float | None, first: Span | None) -> bool:
    """Return whether a fault of a node may be the cause of what first failed then."""
    return when is None or first is None or first[0] - BEFORE <= when <= first[1] + AFTER


def span(event: Event, case: Case) -> Span | None:
    """Return the times between which an event was; None if nothing is known.

    A line without a stamp was after the last stamp before it, and before the next one.
    """
    if event.time is None:
        return None
    if event.exact:
        return event.time, event.time
    later = (
        other.time
        for other in (*case.causes, *case.consequences)
        if other.exact
        and other.time is not None
        and other.origin.source == event.origin.source
        and other.order > event.order
        and other.time >= (event.time or 0.0)
    )
    return event.time, min(later, default=math.inf)


def _is_of_others(event: Event) -> bool:
    """Return whether an exception speaks of another process or of all, so it follows from that."""
    return remarks.is_of_others(event.fields.get("message", ""))


def _is_aftermath(event: Event, case: Case) -> bool:
    """Return whether a rank's failure came after the communication broke, so it is not the
    cause.
    """
    if event.is_hollow and event.own_frame is None:
        # What a lost peer left to say, whichever process says it.
        broken = (
            first for origin, first in case.broken.items() if origin.source == event.origin.source
        )
        return min(broken, default=event.order) < event.order
    if event.origin.labeled and case.broken.get(event.origin, event.order) < event.order:
        return True
    when, clock = event.time, clocks.clock_of(event.origin)
    return when is not None and any(
        when - first - (other != clock) * clocks.UNCERTAINTY > AFTERMATH
        for other, first in case.broken_at.items()
    )


def _is_death(event: Event, case: Case) -> bool:
    """Return whether a launcher reports that a signal ended a rank before anything else failed.

    Watchdogs, and launchers once a rank has failed, end the rest with signals, too.
    """
    is_signal = event.is_crash or event.pattern == "child-failed/ray"
    return is_signal and case.timed_out.get(event.origin.source, event.order) >= event.order


def _comes_after(event: Event, case: Case) -> bool:
    """Return whether the scheduler ended a job that had already failed, so it is not the cause."""
    # What a command printed of others, or a row of a table, says nothing of the time by its place.
    if case.is_foreign(event) or remarks.is_row(event.place.quote):
        return False
    for other in case.causes:
        if other.layer in {"scheduler", "launcher"} or other.role == "loss" or other is event:
            continue
        before, after = other.time, event.time
        is_same = other.origin.source == event.origin.source
        # The time of a line without a stamp is that of an earlier one.
        if before is not None and after is not None and (other.exact or not is_same):
            if before < after - clocks.UNCERTAINTY:
                return True
        elif not is_same or other.place.line < event.place.line:
            return True
    return False
