"""The order of causes: which of several events explains the others.

Layers give it: hardware and the scheduler, the program of a rank, the communication of all ranks,
the launcher. The table says where an event stands otherwise; within a place, time decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from dshealthd.explain import clocks, remarks

if TYPE_CHECKING:
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
_OF_A_DEATH = 3
NOTHING = 8
"""The place of what cannot be the cause."""


def place(event: Event, first: Span | None, case: Case) -> int:
    """Return where an event stands in the order; `first` is when the job first failed."""
    layer = "loss" if event.role == "loss" else event.layer
    # A scheduler's reason, while nothing had failed, explains all that follows.
    if layer == "scheduler" and not _comes_after(event, case):
        return 0
    # A fault long before or after the first failure has nothing to do with it, and a program's
    # failure after the communication broke follows from that.
    if (layer == "hardware" and not is_near(event.time, first)) or (
        layer == "program" and _is_aftermath(event, case)
    ):
        return NOTHING
    # A process that died comes before its peers' errors of communication.
    is_death = layer == "launcher" and _is_death(event, case)
    return _OF_A_DEATH if is_death else _LAYERS[layer]


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


def is_near(when: float | None, first: Span | None) -> bool:
    """Return whether a fault of a node may be the cause of what first failed then."""
    return when is None or first is None or first[0] - BEFORE <= when <= first[1] + AFTER


def _is_of_others(event: Event) -> bool:
    """Return whether an exception speaks of another process or of all, so it follows from that."""
    return remarks.is_of_others(event.fields.get("message", ""))


def _is_aftermath(event: Event, case: Case) -> bool:
    """Return whether a rank's failure came after the communication broke, so it is not the
    cause.
    """
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
