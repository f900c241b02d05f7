"""Causality: which event is the cause of a failure.

Layers give the order: hardware and the scheduler, the program of a rank, the communication of all
ranks, the launcher; within a layer, time decides. If the first event only says that something
failed or ended, what stands near it or beneath it says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dshealthd.explain import clocks, remarks
from dshealthd.explain.events import Event, Origin
from dshealthd.explain.reading import CHATTER, cause, standing
from dshealthd.explain.reading import PATTERN as STATED

if TYPE_CHECKING:
    from dshealthd.explain.case import Case

OF_LOST_PEERS = {f"nccl-remote-error/{name}" for name in ("nccl", "gloo", "store")}
"""Reports that a peer is gone: how it ended, or what cut it off, only its own log can say."""
_OF_FILES = "checkpoint-path"
_OF_WHAT_IS_BENEATH = {_OF_FILES, "bad-link"}
"""Failures of files and devices, as a program sees them."""
_WORD = re.compile(r"[\w.-]+")
_NUMBER = re.compile(r"(?<![\w.])\d{3,10}(?![\w.])")
AFTERMATH = 30.0
"""Seconds after broken communication beyond which a program's failure cannot be its cause: gloo and
NCCL notice a closed connection at once."""
BEFORE, AFTER = 900.0, 120.0
"""Seconds before and after the first failure in which a hardware fault may be its cause: a watchdog
waits 600 s, and the kernel log is written a little later than the fault."""
_ORDER = (
    *("reason", "hardware", "program", "death", "communication", "loss"),
    *("scheduler", "launcher", "nothing"),
)
"""The order of causes: layers, a scheduler's reason while nothing had failed, a process that died,
between its program and the communication that it broke, and what cannot be the cause.
"""


def candidates(case: Case) -> list[Event]:
    """Return what may be the cause, in the order of causes."""
    first = _first_failure(case)
    found = sorted(case.causes, key=lambda event: _key(event, first, case))
    root = found[0] if found else None
    why = _stated(found, case) if root is None or _wraps(root) else None
    if why is None and root is not None:
        why = _inner(root, case) or _beneath(root, case, first)
        case.explained = why and root
    if why is not None:
        found.insert(0, why)
    if found and found[0].layer == "communication" and not found[0].is_timeout:
        found[:0] = _confirmations(found[0], case)[:1]
    return found


def holding(root: Event, rank: int, case: Case) -> Event | None:
    """Return what a layer beneath says of the process or node of a rank for which others waited,
    or else what the rank itself said over and over once nobody made progress; None if nothing.
    """
    held = replace(root, rank=rank, host=case.identities.host(rank), fields={}, weak=True)
    held.origin = Origin(root.origin.source)
    repeated = (
        kept.event
        for facts in case.found.sources
        for kept in facts.statements
        if (kept.event.rank, kept.remark.wraps) == (rank, False)
        and kept.remark.weight >= remarks.HINTS
        and kept.event.count >= CHATTER
        and facts.alive < kept.event.last_order
    )
    return _beneath(held, case, _first_failure(case)) or next(repeated, None)


def is_telling(event: Event, case: Case) -> bool:
    """Return whether a consequence shows that something failed: not at the end of a good run."""
    facts = case.found.sources[event.origin.source]
    is_hint = event.weak or event.layer == "program"
    if is_hint and (case.is_done(facts) or facts.alive > event.last_order):
        return False
    return not (case.is_over(event) or event.pattern.endswith(("/ended-by-launcher", "/exit")))


def precedes(event: Event, other: Event) -> bool:
    """Return whether a line stands before another in the same file."""
    return event.origin.source == other.origin.source and event.order < other.order


def _confirmations(root: Event, case: Case) -> list[Event]:
    """Return what says more of a failed connection: the reason of an attempt before it, or an
    address that only works on a single node.
    """
    return [
        one
        for one in case.found.events
        if one.role == "confirmation"
        and (one.slug, one.layer) == (root.slug, root.layer)
        and one.pattern != root.pattern
        and all(root.fields.get(name, value) == value for name, value in one.fields.items())
    ]


def _first_failure(case: Case) -> float | None:
    """Return when the job first failed; what the kernel says may be of another program."""
    times = [
        event.time
        for event in case.causes
        if (event.layer in {"program", "communication", "launcher"} or event.is_effect)
        and event.time is not None
        and not event.of_kernel
    ]
    return min(times, default=None)


def _wraps(event: Event) -> bool:
    """Return whether an event says that something ended or failed, but not why."""
    return (
        event.is_hollow
        or (event.layer == "launcher" and not event.first)
        or (event.layer == "scheduler" and event.signal > 0)
        or event.pattern in OF_LOST_PEERS  # why the peer went
        or event.slug == "ranks-stuck-at-init"  # why those that are missing did not start
        # NCCL's own words of an error say why.
        or (event.layer == "communication" and event.weak and "error" not in event.fields)
    )


def _stated(found: Sequence[Event], case: Case) -> Event | None:
    """Return the remark that says why what wraps the cause failed or ended; None if none does."""
    root = found[0] if found else None
    said = standing(case, near=root if root is not None and root.is_hollow else None)
    if root is not None and root.is_hollow:  # `_beneath` reads the others
        # After a rank's stack, the launcher only says what followed from it.
        is_own = bool(root.frames) and root.origin.labeled
        said = [
            kept
            for kept in said
            if not kept.event.of_kernel
            and (not is_own or kept.event.origin.labeled or precedes(kept.event, root))
        ]
    if root is not None and root.layer in {"scheduler", "communication"}:
        said = [kept for kept in said if _may_explain(kept.event, root, case)]
    confirmed = any(is_telling(event, case) for event in (*found, *case.consequences))
    why = cause(case, said, confirmed=confirmed)
    is_end = why is not None and "how" in why.fields
    return None if is_end and root is not None and root.is_crash else why


def _may_explain(event: Event, noticed: Event, case: Case) -> bool:
    """Return whether a line may say why a peer was lost, or a job ended: it stands or was before
    the report of that, is of a table printed later, or another rank says it that has lost nobody.
    """
    is_timed = event.time is not None and noticed.time is not None
    is_sooner = is_timed and (event.time or 0.0) < (noticed.time or 0.0)
    is_table = remarks.is_row(event.place.quote) or (case.is_foreign(event) and not event.exact)
    if precedes(event, noticed) or (event.layer == "hardware" and is_sooner) or is_table:
        return True
    reporters = {one.rank for one in case.causes if one.pattern == noticed.pattern}
    return noticed.layer == "communication" and event.rank not in {None, *reporters}


def _inner(root: Event, case: Case) -> Event | None:
    """Return what a native library said right before an exception that passes on its code."""
    if root.pattern != "child-failed/python" or not (
        remarks.is_code(root.says) or remarks.names_source(root.says)
    ):
        return None
    native = (
        kept.event
        for kept in standing(case, near=root)
        if not kept.remark.wraps
        and precedes(kept.event, root)
        and remarks.is_native(kept.event.place.quote)
    )
    return min(native, key=lambda one: one.order, default=None)


def _beneath(root: Event, case: Case, first: float | None) -> Event | None:
    """Return what a layer beneath the program said of what then failed in it.

    The kernel, a service of the node or the scheduler explains a program's failure if it names the
    program's process, or speaks of its node shortly before.
    """
    if root.layer == "hardware":
        return None
    found = [
        one
        for one in (*case.causes, *(kept.event for kept in standing(case)))
        if (one.layer == "hardware" or one.of_kernel)
        and one is not root
        and _is_about(one, root, case, first)
    ]
    one = min(found, key=lambda one: (one.pattern == STATED, one.time or 0.0), default=None)
    if one is None:
        return None
    return replace(one, rank=None, ranks=(), host=root.host or one.host)


def _is_about(one: Event, root: Event, case: Case, first: float | None) -> bool:
    """Return whether what is beneath the program speaks of the process or node that failed."""
    if not _pids(root, case).isdisjoint(_NUMBER.findall(one.place.quote)):
        return True
    if not (root.weak or root.slug in _OF_WHAT_IS_BENEATH):  # it says why itself
        return False
    own = root.host
    speaker = one.host or one.origin.host
    names = {speaker or "", *_WORD.findall(one.place.quote)}
    is_there = own is not None and own.lower() in map(str.lower, names)
    is_unknown = own is None or speaker is None
    is_open = is_unknown and (len(case.identities.names) == 1 or root.slug == _OF_FILES)
    if not (is_there or is_open):
        return False
    when = first if root.time is None else root.time
    return is_there if when is None or not one.exact else _is_near(one.time, when)


def _pids(root: Event, case: Case) -> set[str]:
    """Return the processes that a failure names, or that its rank had."""
    pids = {root.fields.get("pid"), root.origin.pid, *case.identities.pids(root.rank)}
    pids |= {one.pid for one in case.found.failures if one.rank == root.rank is not None}
    return {str(pid) for pid in pids}


def _place(event: Event, first: float | None, case: Case) -> str:
    """Return the place of an event in the order; `first` is when the job first failed."""
    layer = "loss" if event.role == "loss" else event.layer
    # A scheduler's reason, while nothing had failed, explains all that follows.
    is_reason = layer == "scheduler" or remarks.is_row(event.place.quote)
    if is_reason and not _comes_after(event, case):
        return "reason"
    # A fault long before or after the first failure has nothing to do with it, and a program's
    # failure after the communication broke follows from that.
    if (layer == "hardware" and not _is_near(event.time, first)) or (
        layer == "program" and _is_aftermath(event, case)
    ):
        return "nothing"
    # A process that died comes before its peers' errors of communication.
    return "death" if layer == "launcher" and _is_death(event, case) else layer


def _key(event: Event, first: float | None, case: Case) -> tuple[object, ...]:
    """Return the sort key of a candidate cause: the smallest is the cause."""
    # Who sends a signal has a reason.
    is_signal = event.layer == "scheduler" and event.signal > 0
    place, weak = _place(event, first, case), event.weak or is_signal
    return (
        _ORDER.index(place), weak and place != "program", not event.first,
        _is_of_others(event), weak and (event.bare or event.is_hollow),
        event.time is None, event.time or 0.0, weak, event.origin.source, event.order,
    )  # fmt: skip


def _is_near(when: float | None, first: float | None) -> bool:
    """Return whether a fault of a node may be the cause of what first failed then."""
    return when is None or first is None or -BEFORE <= when - first <= AFTER


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
