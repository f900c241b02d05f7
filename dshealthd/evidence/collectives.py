"""Lagging ranks, by the collectives in the flight recorders of several ranks.

All ranks of a group number its collectives alike.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from dshealthd.core.text import plural
from dshealthd.explain.events import MAX_NAMED, listed
from dshealthd.explain.flight_recorder import MAX_TEXT

if TYPE_CHECKING:
    from collections.abc import Mapping

Digest: TypeAlias = "Mapping[str, Any]"
"""What `dshealthd.explain.flight_recorder.digest` returns."""


def compare(digests: Mapping[int, Digest]) -> list[str]:
    """Compare the flight recorder dumps of ranks, and return one line for each finding.

    Findings are ranks that have not entered the collective in which the others wait, and
    operations that differ between ranks.
    """
    groups: dict[tuple[str, str], dict[int, Digest]] = defaultdict(dict)
    for rank, digest in digests.items():
        for group in digest["groups"]:
            groups[group["name"], group["ranks"]][rank] = group
    lines = []
    for (name, members), ranks in groups.items():
        where = f"group {name}" + (f" of ranks {members[:MAX_TEXT]}" if members else "")
        lines += [f"{where}: {line}" for line in [*_apart(ranks), *_different(ranks)]]
    return lines


def _apart(ranks: Mapping[int, Digest]) -> list[str]:
    first = max(group["entered"] for group in ranks.values())
    ahead = sorted(rank for rank, group in ranks.items() if group["entered"] == first)
    behind = sorted(
        (group["entered"], rank) for rank, group in ranks.items() if group["entered"] < first
    )
    lines = []
    for entered, rank in behind[:MAX_NAMED]:
        missed = _described(ranks[ahead[0]], entered + 1)
        at = _described(ranks[rank], entered)
        lines.append(
            f"rank {rank} has not entered {missed}, which {listed(ahead)} entered; its last is {at}"
        )
    if len(behind) > MAX_NAMED:
        lines.append(
            f"and {plural(len(behind) - MAX_NAMED, 'more rank is', 'more ranks are')} behind"
        )
    if not behind and (
        pending := {rank: group["pending"] for rank, group in ranks.items() if group["pending"]}
    ):
        numbers = {found[0]["number"] for found in pending.values()}
        if len(numbers) == 1:
            rank = min(pending)
            what = _described(ranks[rank], pending[rank][0]["number"])
            lines.append(
                f"{listed(sorted(pending))} entered {what} and did not complete it; none of these "
                "ranks is behind"
            )
    return lines


def _different(ranks: Mapping[int, Digest]) -> list[str]:
    by_number: dict[int, dict[int, tuple[str, str]]] = defaultdict(dict)
    for rank, group in ranks.items():
        for operation in (*group["pending"], *group["last"]):
            by_number[operation["number"]][rank] = operation["name"], operation["sizes"]
    for number, found in sorted(by_number.items()):
        names = {name for name, _ in found.values()}
        if len(names) > 1:
            told = ", ".join(
                f"{listed(sorted(rank for rank in found if found[rank][0] == name))} {name}"
                for name in sorted(names)
            )
            return [f"operation {number} differs between ranks: {told}"]
        shapes = {sizes for _, sizes in found.values()}
        if len(shapes) > 1 and names <= {"all_reduce", "reduce", "broadcast"}:
            told = ", ".join(
                f"{listed(sorted(rank for rank in found if found[rank][1] == sizes))} {sizes}"
                for sizes in sorted(shapes)
            )
            return [f"operation {number} ({names.pop()}) differs in size between ranks: {told}"]
    return []


def _described(group: Digest, number: int) -> str:
    for operation in (*group["pending"], *group["last"]):
        if operation["number"] == number:
            size = f" of {operation['sizes']}" if operation["sizes"] else ""
            state = "" if operation["state"] == "scheduled" else f", {operation['state']}"
            at = f" (called at {operation['at']})" if operation["at"] else ""
            return f"{operation['name']} {number}{size}{state}{at}"
    return f"operation {number}" if number >= 0 else "none"
