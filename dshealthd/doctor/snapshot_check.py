"""Checks built from the findings of one symptom, in the node's last snapshot.

Limits, wording and first steps are those of the alerts, so that the doctor, the web page and the
alerts agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dshealthd.core.collector import is_of_job, reason_in_words
from dshealthd.doctor.check import Check, Result, ok, unknown
from dshealthd.doctor.node_context import NodeContext
from dshealthd.findings.finding import Finding, State
from dshealthd.probe.options import ProbeOptions


@dataclass(frozen=True)
class SnapshotCheck(Check[NodeContext]):
    """A check that waits for the status document."""

    collectors: tuple[str, ...] = ()
    """Collectors whose sources it needs: if one cannot be read, the result is unknown."""
    alerts: str | tuple[str, ...] = ""
    """Prefixes of its alerts' names, for a symptom with several checks."""


def nothing(_context: NodeContext) -> Iterator[Result]:
    """Yield nothing, for a check with no results besides the findings of its symptom."""
    yield from ()


def snapshot_check(
    slug: str,
    name: str,
    title: str,
    *collectors: str,
    alerts: str | tuple[str, ...] = "",
    absent: tuple[str, str] = ("", ""),
    problems: Callable[[NodeContext], Iterable[Result]] = nothing,
) -> SnapshotCheck:
    """Return the check of one symptom, whose ok result is its title.

    `alerts` has the prefixes of this check's alerts, for a symptom with several checks; without
    any, no finding is shown. `absent` is a metric, and what is said where it has no sample.
    `problems` yields results that findings do not cover.
    """
    metric, without = absent

    def run(context: NodeContext) -> Iterator[Result]:
        found = [*problems(context)]
        if not collectors and context.document.get("source") != "agent":
            yield from found or [_without_agent(context)]
            return
        found += [result_of(finding) for finding in _of(context, "findings", slug, alerts)]
        yield from found
        starting = context.document.get("source") == "agent" and not context.document["ready"]
        yield from _unread(context, collectors, found, starting=starting)
        if starting:
            why = "the agent has just started, and has not judged all sources yet"
            yield unknown(why, remedy="wait a few seconds, then run `dshealthd doctor` again")
        elif not found and (text := _readable(context, collectors)):
            if text == "ok":
                text = without if metric and not any(context.series(metric)) else title
            watched = _of(context, "watched", slug, alerts)
            signs = "; ".join(f"{one.summary}: {one.detail}" for one in watched)
            yield ok(f"no finding yet, as it has not lasted: {signs}" if signs else text)

    return SnapshotCheck(slug, name, title, run, collectors=collectors, alerts=alerts)


def _without_agent(context: NodeContext) -> Result:
    """Return the result of a check that only an agent can answer, where no agent does."""
    if context.config.section(ProbeOptions).wanted:
        return unknown(
            "probes are configured, but no agent answers, so their results are unknown",
            remedy="systemctl status dshealthd; journalctl -u dshealthd -n 50",
        )
    if unheard := context.document.get("unheard"):
        return unknown(f"only an agent knows, and none could be queried: {unheard}")
    return ok("not applicable: neither an agent nor probes")


def _of(
    context: NodeContext, section: str, slug: str, alerts: str | tuple[str, ...]
) -> list[Finding]:
    return [
        finding
        for finding in context.findings[section]
        if finding.slug == slug
        and finding.alert.startswith(alerts)
        and finding.severity is not State.UNKNOWN
    ]


def result_of(finding: Finding) -> Result:
    """Return the doctor's result that shows a finding."""
    return Result(
        finding.severity,
        f"{finding.summary}: {finding.detail}",
        remedy=finding.first_step,
        value=_figure(finding.value),
        limit=_figure(finding.limit),
        source=finding.limit_source or finding.source,
        component=component(finding.part),
        slug=finding.slug,
    )


def component(part: str) -> str:
    """Return a part as results write it: `gpu 3` for `GPU 3`."""
    return f"gpu {part[4:]}" if part.startswith("GPU ") else part


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _unread(
    context: NodeContext,
    collectors: tuple[str, ...],
    found: Iterable[Result],
    *,
    starting: bool,
) -> Iterator[Result]:
    """Yield what a snapshot check could not read, unless a finding covers that part, or its agent
    is `starting` and has yet to try.
    """
    told = {result.component.lower() for result in found}
    for name in collectors:
        state = context.collectors.get(name)
        if state is None:
            yield unknown(
                f"collector {name} is disabled",
                remedy=f"set collectors.{name}.enabled = true",
                component=name,
            )
            continue
        if state["state"] == "failing" or (state["state"] == "pending" and not starting):
            reason = reason_in_words(state["reason"] or "no answer in time")
            yield unknown(
                f"{name} could not be read: {reason}: {state['detail']}",
                remedy=_how_to_read(state["reason"], name),
                component=name,
            )
        for fault in state["faults"]:
            if is_of_job(fault["part"]):
                continue
            if (part := component(fault["part"])).lower() not in told:
                yield unknown(
                    f"{fault['part']} could not be read: {reason_in_words(fault['reason'])}: "
                    f"{fault['detail']}",
                    remedy=_how_to_read(fault["reason"], name),
                    component=part,
                )


def _how_to_read(reason: str | None, name: str) -> str:
    if reason == "permission_denied":
        return "sudo dshealthd doctor"
    return f"dshealthd metrics | grep 'collector=\"{name}\"'"


def _readable(context: NodeContext, collectors: tuple[str, ...]) -> str:
    """Return `ok` if the check's source was read, why there is none here, or ""."""
    states = [context.collectors[name] for name in collectors if name in context.collectors]
    if any(state["state"] in {"failing", "pending"} for state in states):
        return ""
    if any(state["state"] == "ok" for state in states) or not collectors:
        return "ok"
    absent = [state["detail"] for state in states if state["state"] == "not available"]
    return f"not applicable: {absent[0]}" if absent else ""
