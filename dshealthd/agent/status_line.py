"""The status line for `systemctl status`: problems first, then what works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.result import CollectionOutcome
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.core.snapshot import Snapshot

SHOWN = 3
"""Most problems that are spelled out; nobody reads a line that wraps."""
MAX_PROBLEM = 200
"""Most characters of one problem."""


def status_line(snapshot: Snapshot, problems: Iterable[str], url: str, now: float) -> str:
    """Return the status line; `problems` are the agent's own, `now` is on the snapshot's clock.

    While the agent starts, it says so: "0 collectors ok" reads as broken. Without NVML or GPUs it
    includes the reason, which matters most on a GPU node.
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
    collectors = sum(1 for _ in snapshot)
    if not collectors:
        counts = "starting"
    elif pending:
        counts = (
            f"starting: {collectors - pending} of {plural(collectors, 'collector')} have a result"
        )
    else:
        counts = f"{plural(ok, 'collector')} ok, {absent} not available"
    return "; ".join([*shown, f"{counts}{note}", url])


def first_of(error: str) -> str:
    """Return the first line of an error, and the number of further lines."""
    first, *others = error.splitlines() or [""]
    return f"{first} (and {len(others)} more)" if others else first
