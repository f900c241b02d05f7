"""Training jobs as text for a terminal: `dshealthd jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.findings.finding import State
from dshealthd.plural import plural
from dshealthd.status.paint import duration, safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dshealthd.status.paint import Paint
    from dshealthd.status.query import AgentAnswer


def job_lines(job: Mapping[str, Any], paint: Paint) -> Iterator[str]:
    """Yield the lines about one job: its progress, and the culprit if it hangs."""
    hang = job["hang"]
    failures = job.get("failures", ())  # which older agents do not report
    stall = job.get("stall")
    bad = hang or failures or job["loss"] == "not finite"
    state = State.CRITICAL if bad else State.WARNING if stall else State.OK
    here, world = job["ranks_here"], job["world_size"]
    number = f"{here} of {plural(world, 'rank')}" if world else plural(here, "rank")
    parts = [f"{number} here"]
    if job["step"] is not None:
        parts.append(f"step {job['step']}")
    if job["steps_per_minute"] is not None:
        parts.append(f"{job['steps_per_minute']:g} steps/min")
    if job["step"] is not None:
        parts.append(f"loss {safe(job['loss'])}")
    yield f"{safe(job['job'])}  {paint(state, safe(job['state']))}  {', '.join(parts)}"
    if hang:
        overdue = hang["overdue_seconds"]
        lasts = "" if overdue is None else f", {duration(overdue)} longer than expected"
        yield f"    no progress{lasts}; cause: {safe(hang.get('says') or hang['cause'])}"
        for culprit in hang["culprits"]:
            # Agents of older releases send only a word.
            yield f"    rank {culprit['rank']} {safe(culprit.get('says') or culprit['reason'])}"
    if stall:
        lasts, left = duration(stall["silent_seconds"]), duration(stall["hung_in_seconds"])
        yield f"    {safe(stall['says'])} for {lasts}; counts as hung in {left}"
    for failure in failures:
        rank = "" if failure["rank"] is None else f" on rank {failure['rank']}"
        node = f" ({safe(failure['node'])})" if failure["node"] else ""
        yield f"    failure in its log: {safe(failure['slug'])}{rank}{node}"
    if job["evidence"]:
        yield f"    evidence: {safe(job['evidence'])}"


def ranks(job: str, answers: Sequence[AgentAnswer]) -> Iterator[str]:
    """Yield a table of one job's ranks on all queried nodes."""
    rows = [("rank", "node", "step", "at", "process", "step time", "overdue")]
    found = [
        (answer.name, rank)
        for answer in answers
        for one in answer.document.get("jobs", ())
        if one["job"] == job
        for rank in one["ranks"]
    ]
    for name, rank in sorted(found, key=lambda entry: entry[1]["rank"]):
        overdue = rank["overdue_seconds"]
        rows.append(
            (
                str(rank["rank"]),
                safe(name),
                "unknown" if rank["step"] is None else str(rank["step"]),
                safe(_place(rank)),
                safe(rank["process"] or "unknown"),
                "unknown" if rank["step_seconds"] is None else duration(rank["step_seconds"]),
                duration(overdue) if overdue else "-",
            )
        )
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield f"    {'  '.join(cells).rstrip()}"


def _place(rank: Mapping[str, Any]) -> str:
    """Return what a rank is doing: the phase that it marked, or the stage of its step."""
    marked = rank["phase"] not in {None, "training"}
    return str(rank["phase"] if marked else rank["stage"] or "unknown")
