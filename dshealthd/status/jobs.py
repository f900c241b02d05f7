"""Training jobs as text for a terminal: `dshealthd jobs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import duration, plural, printable
from dshealthd.findings import coverage
from dshealthd.findings.finding import State
from dshealthd.findings.overview import JobPart, merge_job
from dshealthd.jobs import own_work

if TYPE_CHECKING:
    from dshealthd.status.paint import Paint
    from dshealthd.status.query import AgentAnswer

    Part = tuple[AgentAnswer, Mapping[str, Any]]
    """An agent's answer, and what it says of one job."""

_STATES = {
    **dict.fromkeys(("hung", "failed"), State.CRITICAL),
    **dict.fromkeys(("stalled", "suspended"), State.WARNING),
    **dict.fromkeys(("training", "paused"), State.OK),
}
"""Colors of what is known; a job that is silent or sends no heartbeats has none."""
_HEADS = (
    *("rank", "node", "step", "age", "at", "process"),
    *("step time", "own work", "wait", "factor", "overdue"),
)


def parts_of(name: str, answers: Sequence[AgentAnswer]) -> list[Part]:
    """Return what each queried agent says of a job."""
    return [
        (answer, job)
        for answer in answers
        for job in answer.document.get("jobs", ())
        if job["job"] == name
    ]


def whole(parts: Sequence[Part]) -> JobPart:
    """Return a job as it is over all queried nodes together."""
    return merge_job(
        [
            JobPart(
                "hung" if job["hang"] else job["state"],
                (job["hang"] or job["stall"] or {"cause": ""})["cause"],
                job["ranks_here"],
                job["world_size"],
                job["step"],
                job["step_highest"],
                job["steps_per_minute"],
                job["loss"],
                job["attempts"],
            )
            for _, job in parts
        ]
    )


def job_lines(name: str, parts: Sequence[Part], paint: Paint) -> Iterator[str]:
    """Yield the lines about one job on all queried nodes: its progress, and the culprits of a
    hang.
    """
    found = whole(parts)
    lost = found.loss == "not finite"
    level = State.CRITICAL if lost else _STATES.get(found.state)
    says = found.state
    pauses = [job["stall"] for _, job in parts if job["state"] == "paused" and job["stall"]]
    if says == "paused" and pauses:
        longest = max(pauses, key=lambda stall: float(stall["silent_seconds"]))
        says = f"{longest['says']} for {duration(longest['silent_seconds'])}"
    if says == "silent":
        says = _silence(parts) or says
    facts = ", ".join((*_process(parts), *_facts(found, len(parts)), *_followed(parts)))
    yield f"{printable(name)}  {paint(level, printable(says))}  {facts}"
    for answer, job in parts:
        where = f"{printable(answer.name)}: " if len(parts) > 1 else ""
        for line in _details(job, hung=found.state == "hung"):
            yield f"    {where}{line}"
    for line in _slow(parts):
        yield f"    {line}"


def _slow(parts: Sequence[Part]) -> Iterator[str]:
    """Yield the slow ranks of a job, compared over all nodes that were queried."""
    shown = [part for answer, job in parts for part in own_work.told(answer.name, job["own_work"])]
    for slow in own_work.slow_ranks(shown):
        role = f" ({printable(slow.role)})" if slow.role else ""
        lost = f"up to {slow.loss:.0%} of the job's throughput is lost"
        waits = "the job does not wait for it: other ranks have more to do"
        yield (
            f"rank {slow.rank} on {printable(slow.node)}{role} takes {slow.ratio:.2f} times "
            f"as long as its peers; {lost if slow.loss > own_work.LOSS else waits}"
        )


def _silence(parts: Sequence[Part]) -> str:
    """Return for how long no rank was heard, and from when on that is judged; empty if unknown."""
    ages = [
        (answer.document["time"] - rank["heartbeat"], rank["bound_seconds"])
        for answer, job in parts
        for rank in job["ranks"]
        if rank["heartbeat"] is not None
    ]
    if not ages:
        return ""
    age = min(age for age, _ in ages)
    bound = max((bound for _, bound in ages if bound is not None), default=None)
    usual = "" if bound is None else f", judged from {duration(bound)} on"
    return f"no step for {duration(age)}{usual}"


def _process(parts: Sequence[Part]) -> Iterator[str]:
    for _, job in parts:
        if job.get("script"):
            user = f" of user {printable(job['user'])}" if job.get("user") else ""
            yield f"{printable(job['script'])}{user} (pid {job['pid']})"
            return


def _facts(job: JobPart, nodes: int) -> Iterator[str]:
    """Yield how many ranks there are and where, then steps, pace and loss."""
    world = job.world_size
    number = f"{job.ranks} of {plural(world, 'rank')}" if world else plural(job.ranks, "rank")
    yield f"{number} here" if nodes == 1 else f"{number} on {plural(nodes, 'node')}"
    if (job.attempts or 1) > 1:
        yield f"attempt {job.attempts}"
    if job.step is None:
        return
    apart = job.step_highest not in {None, job.step}
    yield f"steps {job.step}-{job.step_highest}" if apart else f"step {job.step}"
    if job.steps_per_minute is not None:
        yield f"{job.steps_per_minute:g} steps/min"
    yield f"loss {printable(job.loss)}"


def _followed(parts: Sequence[Part]) -> Iterator[str]:
    """Yield what follows the ranks of a job, where not all send heartbeats."""
    by: Counter[str] = Counter()
    for _, job in parts:
        told = job["followed"]
        by.update({one: told.get(one, 0) for one in (coverage.HEARTBEAT, *coverage.WORDS)})
    others = [f"{by[one]} by {words}" for one, words in coverage.WORDS.items() if by[one]]
    if others:
        heard = f"{by[coverage.HEARTBEAT]} by heartbeats, " if by[coverage.HEARTBEAT] else ""
        yield f"followed: {heard}{', '.join(others)}"


def _details(job: Mapping[str, Any], *, hung: bool) -> Iterator[str]:
    """Yield what one node says of a job beyond its progress.

    `hung` is whether the job is, on all nodes together.
    """
    hang, stall = job["hang"], job["stall"]
    if hang:
        overdue = hang["overdue_seconds"]
        lasts = "" if overdue is None else f", {duration(overdue)} longer than expected"
        cause = printable(hang["says"] or hang["cause"])
        yield f"no progress{lasts}; cause: {cause}" if hung else f"waits{lasts}: {cause}"
        for culprit in hang["culprits"]:
            yield f"rank {culprit['rank']} {printable(culprit['says'])}"
    if stall and job["state"] != "paused":  # which the headline says
        lasts, left = duration(stall["silent_seconds"]), stall["hung_in_seconds"]
        later = "" if left is None or hung else f"; counts as hung in {duration(left)}"
        yield f"{printable(stall['says'])} for {lasts}{later}"
    for failure in job["failures"]:
        rank = "" if failure["rank"] is None else f" on rank {failure['rank']}"
        node = f" ({printable(failure['node'])})" if failure["node"] else ""
        yield f"failure in its log: {printable(failure['slug'])}{rank}{node}"
    if job["evidence"]:
        yield f"evidence: {printable(job['evidence'])}"


def ranks(parts: Sequence[Part]) -> Iterator[str]:
    """Yield a table of one job's ranks on all queried nodes.

    Their steps are of different moments, so each row has its age.
    """
    rows = [_HEADS]
    found = [(answer, rank) for answer, job in parts for rank in job["ranks"]]
    for answer, rank in sorted(found, key=lambda entry: entry[1]["rank"]):
        heard, ratio = rank["heartbeat"], rank["work_ratio"]
        age = None if heard is None else max(0.0, answer.document["time"] - heard)
        rows.append(
            (
                str(rank["rank"]),
                printable(answer.name),
                "unknown" if rank["step"] is None else str(rank["step"]),
                _seconds(age),
                printable(_place(rank)),
                printable(rank["process"] or "unknown"),
                "unknown" if rank["step_seconds"] is None else duration(rank["step_seconds"]),
                _seconds(rank["work_seconds"]),
                _seconds(rank["wait_seconds"]),
                "-" if ratio is None else f"{ratio:.2f}",
                _seconds(rank["overdue_seconds"] or None),
            )
        )
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield f"    {'  '.join(cells).rstrip()}"
    for answer, job in parts:
        heard = job["followed"].get(coverage.HEARTBEAT, 0)
        if (more := heard - len(job["ranks"])) > 0:
            yield f"    and {plural(more, 'rank')} more on {printable(answer.name)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _place(rank: Mapping[str, Any]) -> str:
    """Return what a rank is doing: the phase that it marked, or the stage of its step."""
    marked = rank["phase"] not in {None, "training"}
    return str(rank["phase"] if marked else rank["stage"] or "unknown")
