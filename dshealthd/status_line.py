"""The status line for `systemctl status`: the agent's state, problems first, then what works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.result import CollectionOutcome
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.core.snapshot import Snapshot

SHOWN = 3
"""Problems that are spelled out; a line that wraps is not read."""
MAX_PROBLEM = 200
"""Characters of one problem."""


def status_line(snapshot: Snapshot, problems: Iterable[str], url: str, now: float) -> str:
    """Return the status line; `problems` are the agent's own, `now` is of the snapshot's clock.

    Without NVML or GPUs the reason stands there too: on a GPU node that is the thing to know.
    """
    told = list(problems)
    ok = absent = pending = 0
    note = ""
    for latest in snapshot:
        if latest.sampled is None:
            pending += 1
        elif latest.result.outcome is CollectionOutcome.NOT_AVAILABLE:
            absent += 1
            if latest.name == "gpu":
                note = f"; no GPUs: {latest.result.detail}"
        elif latest.result.outcome is CollectionOutcome.ERROR:
            told.append(f"{latest.name} {latest.result.reason}: {latest.result.detail}")
        elif latest.expired(now):
            told.append(f"{latest.name}: no sample for {now - latest.sampled:.0f} s")
        else:
            ok += 1
    shown = [problem[:MAX_PROBLEM] for problem in told[:SHOWN]]
    if len(told) > SHOWN:
        shown.append(f"{len(told) - SHOWN} more")
    counts = f"{plural(ok, 'collector')} ok, {absent} not available"
    if pending:
        counts += f", {pending} pending"
    return "; ".join([*shown, f"{counts}{note}", url])


def first_of(error: str) -> str:
    """Return an error of several lines as one for the status: the first, and how many follow."""
    first, *others = error.splitlines() or [""]
    return f"{first} (and {len(others)} more)" if others else first
