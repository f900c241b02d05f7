"""The answer of `dshealthd explain` as text for people and as JSON for programs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import nodes_to_exclude, plural
from dshealthd.explain.events import listed
from dshealthd.explain.patterns import heading

if TYPE_CHECKING:
    from dshealthd.explain.events import Event, Place
    from dshealthd.explain.facts import Recognized
    from dshealthd.explain.finding import Finding

SCHEMA = 1
"""Version of the JSON; raised when a key changes its meaning or is removed."""
MAX_CHAIN = 12
NEXT_TIME = "; next time "
"""What parts a first step from what to switch on for another failure of its kind."""
MAX_WIDTH = 180
SURENESS = {"certain": "CAUSE", "likely": "LIKELY", "possible": "POSSIBLE"}
"""How an answer begins, by how sure it is."""


def text(finding: Finding, found: Recognized, unread: list[str]) -> str:
    """Return the answer in a few lines: what happened and where, why that is so, what to do."""
    lines = []
    runbook = heading(finding.slug)[1] if finding.slug else ""
    if finding.outcome == "nothing":
        lines.append(f"No failure found in {_read(found)}.")
    elif finding.outcome == "undecided":
        where = _where(finding)
        lines.append(f"UNDECIDED  {_short(finding.statement)}" + f" ({where})" * bool(where))
    else:
        headline, says = _headline(finding)
        where = _where(finding)
        lines.append(f"{SURENESS[finding.sureness]:<10} {headline}" + f" ({where})" * bool(where))
        if says:
            lines.append(f"WHAT       {says}")
        if finding.time is not None:
            own = finding.root is None or finding.root.exact
            lines.append(f"WHEN       {'' if own else 'after '}{_iso(finding.time)}")
    now, _, later = finding.step.partition(NEXT_TIME)
    for name, texts in (
        (
            "READ" if finding.outcome == "undecided" else "PROOF",
            [f"{one.file}:{one.line}: {_short(one.quote)}" for one in _unique(finding.proof)],
        ),
        ("NOT", map(_short, finding.against)),
        ("MISSING", map(_short, (*finding.missing, *unread))),
        ("FIRST STEP", [now] * bool(now)),
        ("NEXT TIME", [later] * bool(later)),
        ("EXCLUDE", [f"--exclude={','.join(finding.excluded)}"] * bool(finding.excluded)),
        ("RUNBOOK", [f"dshealthd explain --runbook {finding.slug}"] * bool(runbook)),
    ):
        lines += [f"{'' if number else name:<10} {says}" for number, says in enumerate(texts)]
    chain = _further(finding)
    if chain:
        lines += [
            "",
            "What followed:" if finding.outcome != "nothing" else "The job continued after:",
        ]
        lines += [_followed(event) for event in chain[:MAX_CHAIN]]
        if len(chain) > MAX_CHAIN:
            lines.append(f"  … and {len(chain) - MAX_CHAIN} more (--json has them)")
    return "\n".join(lines) + "\n"


def _headline(finding: Finding) -> tuple[str, str]:
    """Return what happened in a few words, and in a sentence if that says more."""
    title = _short(finding.title or (heading(finding.slug)[0] if finding.slug else ""))
    says = _short(finding.statement)
    # An exception says itself what happened.
    is_own = finding.root is not None and finding.root.pattern == "child-failed/python"
    if is_own or says == title:
        return says, ""
    if says.lower().startswith(title.lower()):
        return says[:1].upper() + says[1:], ""
    return title, says


def _further(finding: Finding) -> list[Event]:
    """Return what followed that the answer has not said yet.

    That a process was ended, anybody can tell by now.
    """
    found: dict[tuple[str, int | None], Event] = {}
    root = finding.root
    for event in finding.chain:
        is_echo = event.role == "consequence" and event.layer == "launcher"
        is_said = any(event.says in one for one in finding.against)
        is_same = root is not None and (event.says, event.rank) == (root.says, root.rank)
        if not (is_echo or is_said or is_same):
            found.setdefault((event.says, event.rank), event)
    return list(found.values())


def document(finding: Finding, found: Recognized, unread: list[str]) -> dict[str, Any]:
    """Return the answer as JSON values; every claim has file, line and quote."""
    statistics = found.statistics
    now, _, later = finding.step.partition(NEXT_TIME)
    title, runbook = heading(finding.slug) if finding.slug else ("", "")
    return {
        "schema": SCHEMA,
        "outcome": finding.outcome,
        "sureness": finding.sureness or None,
        "slug": finding.slug or None,
        "failure": finding.root.pattern if finding.root else None,
        "title": finding.title or title or None,
        "statement": finding.statement or None,
        "ranks": list(finding.ranks),
        "host": finding.host,
        "pod": finding.pod,
        "pid": finding.pid,
        "gpu": finding.gpu,
        "device": finding.device,
        "where": _where(finding) or None,
        "time": _iso(finding.time),
        "proof": [_place(place) for place in _unique(finding.proof)],
        "fields": dict(finding.root.fields) if finding.root else {},
        "against": list(finding.against),
        "missing": [*finding.missing, *unread],
        "first_step": now or None,
        "next_time": later or None,
        "exclude": nodes_to_exclude(finding.excluded),
        "runbook": runbook or None,
        "groups": [
            {
                "group": verdict.group,
                "kind": verdict.kind,
                "operation": verdict.operation,
                "sequence": verdict.sequence,
                "culprits": list(verdict.culprits),
                "waiting": list(verdict.waiting),
                "says": verdict.says,
                "proof": [_place(place) for place in verdict.proof],
            }
            for verdict in finding.verdicts
        ],
        "chain": [
            {
                "slug": event.slug,
                "failure": event.pattern,
                "role": event.role,
                "says": event.says,
                "rank": event.rank,
                "host": event.host,
                "time": _iso(event.time),
                "count": event.count,
                **_place(event.place),
            }
            for event in finding.chain
        ],
        "read": {
            "files": statistics.files,
            "bytes": statistics.bytes,
            "lines": statistics.lines,
            "lines_examined": statistics.examined,
            "lines_with_replaced_bytes": statistics.replaced,
            "lines_cut": statistics.cut,
            "events_dropped": found.dropped,
        },
    }


def _read(found: Recognized) -> str:
    statistics = found.statistics
    return f"{plural(statistics.lines, 'line')} in {plural(statistics.files, 'file')}"


def _where(finding: Finding) -> str:
    """Return where a cause is, as far as the logs say; empty if they do not."""
    root = finding.root
    fields = root.fields if root is not None else {}
    port, address = fields.get("port", ""), fields.get("address", "")
    if not set(address) & set(".:-"):  # a number of a device, or one in memory
        address = ""
    parts = []
    if finding.ranks:
        parts.append(listed(finding.ranks))
    elif finding.is_symmetric:
        parts.append("all ranks alike")
    elif root is not None and root.layer == "scheduler":
        if "job" in fields or finding.host is None:
            parts.append(f"job {fields['job']}" if "job" in fields else "the whole job")
    elif root is not None and root.rank is not None:
        parts.append(f"reported by rank {root.rank}")
    parts += [
        f"{name}{value}"
        for name, value in (
            ("pod ", finding.pod),
            ("host ", finding.host),
            ("pid ", finding.pid),
            ("GPU ", finding.gpu),
            ("", finding.device),
            ("peer ", fields.get("peer")),
            ("", f"{address}:{port}".rstrip(":") if address else None),
            ("port ", port if port and not address else None),
        )
        if value is not None
    ]
    return ", ".join(parts)


def _followed(event: Event) -> str:
    when = f"{_iso(event.time)} " if event.time is not None else ""
    who = f"rank {event.rank}: " if event.rank is not None else ""
    times = f" ({event.count} times)" if event.count > 1 else ""
    return f"  {when}{who}{_short(event.says)}{times}  [{event.place.file}:{event.place.line}]"


def _place(place: Place) -> dict[str, Any]:
    return {"file": place.file, "line": place.line, "quote": place.quote}


def _unique(places: tuple[Place, ...]) -> list[Place]:
    return list({(place.file, place.line): place for place in places}.values())


def _short(value: str) -> str:
    line = "".join(character if character.isprintable() else " " for character in value)
    return line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 1] + "…"


def _iso(when: float | None) -> str | None:
    if when is None:
        return None
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%S")
