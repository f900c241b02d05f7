"""A node's record as text for a terminal: a strip of days, then one line an entry."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import duration, plural, printable
from dshealthd.findings.catalogue import catalogue
from dshealthd.findings.entry import MARKS, Entry
from dshealthd.findings.finding import SCHEMA, State
from dshealthd.symptoms.entry import PART_COMPONENTS

if TYPE_CHECKING:
    from dshealthd.status.paint import Paint
    from dshealthd.status.query import AgentAnswer

_LEGEND = ". nothing, w warning, ? unreadable, C critical, blank not watched"


def node(answer: AgentAnswer, seconds: float, paint: Paint) -> Iterator[str]:
    """Yield the lines of a node's record of the last `seconds`."""
    name = printable(answer.name)
    if answer.problem:
        yield f"{name}  {printable(answer.problem)}"
        return
    document = answer.document
    since = document["since"]
    yield f"{name}  record since {_day(document['time'] if since is None else since)}"
    if problem := document["problem"]:
        yield f"  {printable(problem)}"
    if ahead := document["in_the_future"]:
        yield f"  {plural(ahead, 'entry is', 'entries are')} dated in the future and left out"
    strip = "".join(_mark(day["worst"], paint) for day in document["days"])
    yield f"  last {plural(len(document['days']), 'day')}  |{strip}|  {_LEGEND}"
    entries = _within(document, seconds)
    for entry in entries:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.begin))
        state = entry.severity
        shown = paint(state, state.upper().ljust(8)) if state else " " * 8
        yield f"  {at}  {shown}  {entry_in_words(entry, document['time'])}"
    if not entries:
        yield f"  nothing within {duration(seconds)}"


def report(answers: Sequence[AgentAnswer], seconds: float) -> dict[str, Any]:
    """Return the document that `dshealthd history --json` prints."""
    return {
        "schema": SCHEMA,
        "nodes": [
            {
                "node": answer.name,
                "url": answer.url,
                "error": answer.problem or None,
                **answer.document,
                **({} if answer.problem else {"entries": _within(answer.document, seconds)}),
            }
            for answer in answers
        ],
    }


def faults_of_jobs(answer: AgentAnswer, jobs: Container[str]) -> list[Entry]:
    """Return what of a node's own has struck one of these jobs, by the record that it answered.

    Not what is the job's, nor what nodes share, as a file system.
    """
    return [
        entry
        for entry in answer.document["entries"]
        if entry.job in jobs
        and entry.severity == State.CRITICAL
        and (known := catalogue().get(f"Dshealthd{entry.what}")) is not None
        and known.type.component in PART_COMPONENTS - {"path"}
    ]


def entry_in_words(entry: Entry, now: float) -> str:
    """Return an entry of a node's record in words: of a finding, the part, what is wrong, for how
    long, and the reason, which may be any text and therefore comes last.
    """
    if entry.kind not in {"finding", "maintenance"}:
        again = f", {plural(entry.times, 'time')}" if entry.times > 1 else ""
        return f"{printable(entry.says)}{again}"
    part = "" if entry.kind == "maintenance" else f"{printable(entry.part or 'this node')}: "
    reason = f": {printable(entry.reason)}" if entry.reason else ""
    lasted = duration(max(0.0, (now if entry.end is None else entry.end) - entry.begin))
    often = f"{plural(entry.times, 'time')} within" if entry.times > 1 else "for"
    facts = [f"{often} {lasted}{' until now' * (entry.end is None)}"]
    if entry.job and entry.job != entry.part:
        facts.append(f"job {printable(entry.job)}")
    return f"{part}{printable(entry.says)} ({', '.join(facts)}){reason}"


def _within(document: Mapping[str, Any], seconds: float) -> list[Entry]:
    begin = document["time"] - seconds
    return [entry for entry in document["entries"] if entry.end is None or entry.end >= begin]


def _mark(state: State | None, paint: Paint) -> str:
    return MARKS[state] if state in {None, State.OK} else paint(state, MARKS[state])


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))
