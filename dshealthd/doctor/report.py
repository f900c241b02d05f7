"""The report, for people, as JSON, and as other programs expect it (`--for`); exit statuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dshealthd import __version__
from dshealthd.core import schema
from dshealthd.core.text import plural, print_lines, printable
from dshealthd.doctor.check import Result, worst
from dshealthd.doctor.examination import Examined
from dshealthd.findings.finding import ORDER, State
from dshealthd.http.document import Shallow
from dshealthd.status.paint import EXIT, Paint

SCHEMA = 1
"""Version of the JSON document; new keys keep it, a change of meaning increments it."""
_CHECK: schema.Form = schema.of(Examined, Shallow())
TERMINATION = 4096
"""Maximum bytes of a container's termination message."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node."""

    node: str
    checks: tuple[Examined, ...] = ()
    problem: str = ""
    """Why nothing is known about it; empty if it was examined."""
    severity: State = State.CRITICAL
    """How bad a problem is."""
    source: str = ""
    """`agent`, or why the command read the sources itself."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Values that must be the same on all nodes of a job, by name."""

    @property
    def outcome(self) -> State:
        """The worst outcome of the node's checks."""
        return self.severity if self.problem else worst(one.outcome for one in self.checks)


@dataclass(frozen=True, slots=True)
class Report:
    """All nodes, and how they differ."""

    nodes: tuple[NodeReport, ...]
    time: float
    """Unix time in seconds."""
    seconds: float
    across: tuple[Examined, ...] = ()
    """Checks across nodes."""

    @property
    def outcome(self) -> State:
        """The worst outcome of all nodes and of the checks across them."""
        return worst(
            (*(node.outcome for node in self.nodes), *(one.outcome for one in self.across))
        )

    @property
    def exit(self) -> int:
        """The doctor's exit status: 0 ok, 1 warning, 2 critical, 3 unknown."""
        return EXIT[self.outcome]

    def document(self) -> dict[str, Any]:
        """Return the report in the form of `--json`."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "time": round(self.time, 3),
            "seconds": round(self.seconds, 3),
            "verdict": self.outcome.value,
            "nodes": [_node(node) for node in self.nodes],
            "across": [_check(one) for one in self.across],
        }


def _node(node: NodeReport) -> dict[str, Any]:
    return {
        "node": node.node,
        "verdict": node.outcome.value,
        "problem": node.problem or None,
        "source": node.source,
        "facts": dict(node.facts),
        "checks": [_check(one) for one in node.checks],
    }


def _check(one: Examined) -> dict[str, Any]:
    return _CHECK.write(one) | {"outcome": one.outcome}


def parse_node(document: Mapping[str, Any], name: str) -> NodeReport:
    """Return the report of another node from its `--json`, under the name used to reach it.

    KeyError, TypeError, ValueError, AttributeError for anything else.
    """
    if document["schema"] != SCHEMA:
        raise ValueError(f"its answer has document version {document['schema']}, not {SCHEMA}")
    (node,) = document["nodes"]
    return NodeReport(
        name,
        tuple(_CHECK.read(one, "check") for one in node["checks"]),
        source=str(node["source"]),
        facts={str(key): str(value) for key, value in node["facts"].items()},
    )


def found(checks: Sequence[Examined]) -> list[tuple[Examined, Result]]:
    """Return the results for the report: what is not ok, the worst first, accepted ones last."""
    entries = [
        (one, result) for one in checks for result in one.results if result.outcome is not State.OK
    ]
    return sorted(
        entries, key=lambda entry: (bool(entry[1].accepted), -ORDER.index(entry[1].outcome))
    )


def text(report: Report, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Yield the report for people: the worst result first, each with its limit and its remedy."""
    for node in sorted(report.nodes, key=lambda node: -ORDER.index(node.outcome)):
        yield from _node_lines(node, paint, verbose=verbose)
    if len(report.nodes) > 1:
        yield "Across nodes"
        yield from _results(report.across, paint)
        if not found(report.across):
            well = "; ".join(result.text for one in report.across for result in one.results)
            yield f"  {paint(State.OK, 'OK')}        {well}"


def _node_lines(node: NodeReport, paint: Paint, *, verbose: bool) -> Iterator[str]:
    state = node.outcome
    yield f"{printable(node.node)}  {paint(state, state.upper())}  {_headline(node)}"
    yield from _results(node.checks, paint)
    if verbose:
        for one in node.checks:
            for result in one.results:
                if result.outcome is State.OK:
                    word = paint(State.OK, "OK".ljust(8))
                    yield f"  {word}  {printable(one.check)}: {result.text}"
    yield ""


def _headline(node: NodeReport) -> str:
    if node.problem:
        return printable(node.problem)
    well = sum(one.outcome is State.OK for one in node.checks)
    accepted = sum(bool(result.accepted) for one in node.checks for result in one.results)
    known = f", {accepted} accepted" if accepted else ""
    how = "" if node.source in {"", "agent"} else f"; {printable(node.source)}"
    return f"{well} of {plural(len(node.checks), 'check')} OK{known}{how}"


def _results(checks: Sequence[Examined], paint: Paint) -> Iterator[str]:
    """Yield what is not ok, once if several checks say the same: they have a cause in common."""
    having: dict[Result, list[Examined]] = {}
    for one, result in found(checks):
        having.setdefault(result, []).append(one)
    for result, those in having.items():
        yield from _lines(those, result, paint)


def _lines(checks: Sequence[Examined], result: Result, paint: Paint) -> Iterator[str]:
    state = result.outcome
    names = [printable(name) for name in dict.fromkeys(one.check for one in checks)]
    slugs = {printable(result.slug or one.slug) for one in checks}
    word = paint(State.OK, "ACCEPTED") if result.accepted else paint(state, state.upper().ljust(8))
    yield f"  {word}  {names[0] if len(names) == 1 else f'{len(names)} checks'}: {result.text}"
    if result.limit:
        value = f"{result.value} against " if result.value else ""
        source = f" ({result.source})" if result.source else ""
        yield f"            Limit: {value}{result.limit}{source}"
    if result.accepted:
        yield f"            {printable(result.accepted)}"
    elif result.remedy:
        yield f"            Remedy: {result.remedy}"
    if len(names) > 1:
        yield f"            Checks: {', '.join(names)}"
    if len(slugs) == 1:
        yield f"            Runbook: dshealthd doctor --runbook {slugs.pop()}"


def kubernetes(report: Report) -> int:
    """Print the report in one line, slugs and parts; return 1 for a critical result, else 0.

    For an init container or a readiness probe, which other results shall not fail.
    """
    parts = [f"{printable(node.node)} unreachable" for node in report.nodes if node.problem]
    for node in report.nodes:
        for one, result in found((*node.checks, *report.across)):
            if not result.accepted:
                slug, part = result.slug or one.slug, result.component.replace(" ", "=")
                parts.append(f"{printable(slug)} {part}".rstrip())
    line = ", ".join(dict.fromkeys(parts)) or "ok"
    print_lines(line if len(line) <= TERMINATION else f"{line[: TERMINATION - 3]}...")
    return int(report.outcome is State.CRITICAL)


CALLERS: Mapping[str, Callable[[Report], int]] = {"kubernetes": kubernetes}
