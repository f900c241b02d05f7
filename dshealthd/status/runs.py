"""Runs of trainings over their attempts and nodes: `dshealthd jobs --history` and `--report`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import duration, plural, printable
from dshealthd.findings.finding import SCHEMA
from dshealthd.status import past
from dshealthd.training.report import table_lines

if TYPE_CHECKING:
    from dshealthd.findings.entry import Entry
    from dshealthd.jobs.goodput import Card
    from dshealthd.status.query import AgentAnswer

    Part = tuple[AgentAnswer, Entry, Card]
    """An agent's answer, and what it says of one attempt."""

AFTERWARDS = 120.0
"""Seconds after a job's end within which a finding about it counts as seen during it: logs are read
later."""
_WORST = ("boot", "hung", "killed", "crashed", "failed", "unknown", "terminated", "ended", "")
"""Why an attempt ended, by what its nodes say: the first that one of them says is the cause of what
others do."""


def _attempt(parts: Sequence[Part]) -> dict[str, Any]:
    """Return one attempt of a run, from what all its nodes say of it."""
    entries = [entry for _, entry, _ in parts]
    cards = [card for *_, card in parts]
    ends = [entry.end for entry in entries if entry.end is not None]
    answer, blamed, _ = min(parts, key=_turn)
    times: dict[str, float] = {}
    for card in cards:
        for part, seconds in card.times.items():
            times[part] = times.get(part, 0.0) + seconds

    def known(name: str) -> list[Any]:
        return [value for card in cards if (value := getattr(card, name)) is not None]

    return {
        "job": entries[0].job,
        "begin": min(entry.begin for entry in entries),
        "end": max(ends) if len(ends) == len(entries) else None,
        "first_step": min(known("first_step"), default=None),
        "step": min(entry.value or 0 for entry in entries),
        "reason": blamed.reason,
        "says": blamed.says,
        "part": blamed.part,
        "node": answer.name,
        "nodes": [answer.name for answer, *_ in parts],
        "ranks": sum(card.ranks for card in cards),
        "again": any(card.again for card in cards),
        "world_size": next(iter(known("world_size")), None),
        "times": times,
        "step_seconds": [max(each) for each in zip(*known("step_seconds"), strict=True)] or None,
        "memory_peak_bytes": max(known("memory_peak_bytes"), default=None),
        "slowest": _slowest(parts),
        "findings": [
            (answer.name, finding) for answer, entry, _ in parts for finding in _seen(answer, entry)
        ],
    }


def _slowest(parts: Sequence[Part]) -> dict[str, Any] | None:
    """Return the rank with the most own work in a step, and what the job would gain without it:
    until the next one's work.
    """
    found = [(answer.name, card.slowest) for answer, _, card in parts if card.slowest]
    if not found:
        return None
    node, most = max(found, key=lambda each: each[1].work_seconds)
    others = [one.work_seconds for _, one in found if one is not most]
    following = max([*others, most.next_seconds])
    alone = sum(card.ranks for *_, card in parts) == 1
    step = most.step_seconds
    gain = None if alone or step <= 0 else (most.work_seconds - following) / step
    return {"node": node, **asdict(most), "next_seconds": following, "gain": gain}


def _turn(part: Part) -> tuple[int, bool, float]:
    _, entry, card = part
    reason = entry.reason
    turn = _WORST.index(reason) if reason in _WORST else _WORST.index("unknown")
    # Which of the ranks failed first counts, not how.
    turn = _WORST.index("killed") if card.failed is not None and turn > 1 else turn
    return turn, not entry.part, card.failed or entry.begin


def _seen(answer: AgentAnswer, run: Entry) -> Iterator[Entry]:
    """Yield what this node has found about a job during an attempt.

    A finding about the job itself belongs to the attempt in which it began, although it may last
    into the next one, or begin there soon after this one's end. One that came back within an hour
    is a single entry, which does not say when: it and a broken part belong to each attempt.
    """
    begins = [one.begin for one in answer.document.get("runs", ()) if one.job == run.job]
    for entry in answer.document["entries"]:
        over = entry.end is not None and entry.end < run.begin
        later = run.end is not None and entry.begin > run.end + AFTERWARDS
        if entry.kind != "finding" or entry.job != run.job or over or later:
            continue
        latest = max((begin for begin in begins if begin <= entry.begin), default=run.begin)
        if entry.part != run.job or entry.times > 1 or latest == run.begin:
            yield entry


def runs(answers: Sequence[AgentAnswer], job: str = "") -> dict[str, list[dict[str, Any]]]:
    """Return the attempts of each run that these nodes know, the oldest first; of one run or job
    alone, if it is named.
    """
    found: dict[tuple[str, int | None], list[list[Part]]] = {}
    told = [
        (answer, entry, entry.card)
        for answer in answers
        for entry in answer.document.get("runs", ())
        if entry.card is not None
    ]
    for answer, entry, card in sorted(told, key=lambda each: each[1].begin):
        attempts = found.setdefault((entry.what, card.user), [])
        for parts in attempts:
            lasted = any(part.end is None or part.end >= entry.begin for _, part, _ in parts)
            same = parts[0][2].mark == card.mark
            if same and lasted and all(other is not answer for other, *_ in parts):
                parts.append((answer, entry, card))
                break
        else:
            attempts.append([(answer, entry, card)])
    whole: dict[str, list[dict[str, Any]]] = {}
    for (run, user), attempts in found.items():
        names = {part.job for parts in attempts for _, part, _ in parts} | {run}
        if not job or job in names:
            name = run if user is None or run not in whole else f"{run} (uid {user})"
            whole[name] = [_attempt(parts) for parts in attempts]
    return whole


def document(
    answers: Sequence[AgentAnswer], found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return what `dshealthd jobs --history` and `--report` print with `--json`."""
    return {
        "schema": SCHEMA,
        "errors": {answer.name: answer.problem for answer in answers if answer.problem},
        "runs": [
            {
                "run": run,
                "attempts": [
                    {
                        **one,
                        "findings": [
                            {"node": name} | seen.document() for name, seen in one["findings"]
                        ],
                    }
                    for one in attempts
                ],
            }
            for run, attempts in found.items()
        ],
    }


def history(run: str, attempts: Sequence[Mapping[str, Any]], now: float) -> Iterator[str]:
    """Yield the lines about the attempts of a run."""
    yield f"{printable(run)}  {plural(len(attempts), 'attempt')}"
    for number, one in enumerate(attempts, 1):
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["begin"]))
        lasted = duration(max(0.0, (one["end"] or now) - one["begin"]))
        whole = sum(one["times"].values())
        work = one["times"].get("work")
        share = (
            "own work not measured"
            if work is None or whole <= 0
            else f"{work / whole:.0%} own work"
        )
        yield (
            f"  {number}  {at} for {lasted}  {_steps(one)}  {plural(one['ranks'], 'rank')} on "
            f"{plural(len(one['nodes']), 'node')}  {share}  {_why(one)}"
        )
        yield from _findings(one, now)


def report(run: str, attempts: Sequence[Mapping[str, Any]], now: float) -> Iterator[str]:
    """Yield the report of a run over all its attempts."""
    last = attempts[-1]
    yield (
        f"{printable(run)}  {plural(len(attempts), 'attempt')}, {_steps(last)}, "
        f"{plural(last['ranks'], 'rank')} on {plural(len(last['nodes']), 'node')}; {_why(last)}"
    )
    times: dict[str, float] = {}
    for one in attempts:
        for part, seconds in one["times"].items():
            times[part] = times.get(part, 0.0) + seconds
    yield f"  where the time of its ranks went, {duration(sum(times.values()))} together"
    for line in table_lines(times):
        yield f"    {line}"
    for one in attempts:
        if one["again"] and not one["first_step"]:
            yield "    steps made again are unknown: a count that begins at 0 may not be carried on"
            break
    if steps := last["step_seconds"]:
        median, most, nearly, longest = map(duration, steps)
        tail = f"95 % within {most}, 99 % within {nearly}, longest {longest}"
        yield f"  step time: median {median}, {tail}"
    else:
        yield "  step time: not measured"
    if slowest := last["slowest"]:
        ratio = slowest["work_seconds"] / (slowest["usual_seconds"] or slowest["work_seconds"] or 1)
        gain = slowest["gain"]
        without = "" if gain is None else f"; without it the job would gain {gain:.0%}"
        yield (
            f"  slowest rank: {slowest['rank']} on {printable(slowest['node'])}, own work "
            f"{duration(slowest['work_seconds'])} a step, {ratio:.2f} times the usual{without}"
        )
    else:
        yield "  slowest rank: unknown, as no wait for other ranks was seen"
    peak = last["memory_peak_bytes"]
    memory = "not measured" if peak is None else f"{peak / 2**30:.1f} GiB of a GPU"
    yield f"  memory at its highest: {memory}"
    for one in attempts:
        yield from _findings(one, now)


def _steps(one: Mapping[str, Any]) -> str:
    first = one["first_step"]
    return f"steps {'?' if first is None else first}-{one['step']:.0f}"


def _why(one: Mapping[str, Any]) -> str:
    where = f" (on {printable(one['node'])})" if one["part"] and len(one["nodes"]) > 1 else ""
    part = f"{one['part']}: " if one["reason"] == "hung" and one["part"] else ""
    return f"{printable(part + one['says'])}{where}"


def _findings(one: Mapping[str, Any], now: float) -> Iterator[str]:
    for node, finding in sorted(one["findings"], key=lambda each: each[1].begin):
        yield f"     {printable(node)}: {past.entry_in_words(finding, now)}"
