"""Turns signs into findings, with the severity, wording and first step of their symptom."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, NamedTuple, cast

from dshealthd.findings.finding import Finding, State
from dshealthd.symptoms import all_symptoms, sentence
from dshealthd.symptoms.entry import FIRST_STEP, FindingType
from dshealthd.symptoms.runbooks import first_step
from dshealthd.symptoms.template import TemplateError, render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.findings.finding import Sign
    from dshealthd.symptoms.entry import Alert
    from dshealthd.symptoms.template import Query

RUNBOOKS = "/runbooks/"
"""URL path under which every agent serves the runbooks, by slug."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class CatalogueEntry(NamedTuple):
    """The parts of an alert and its symptom that findings use."""

    slug: str
    alert: Alert | FindingType
    hold_seconds: float
    keep_seconds: float


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return all alerts by name.

    The first call reads the package's files: make it before the event loop runs.
    """
    return {
        alert.name: CatalogueEntry(symptom.slug, alert, _hold(alert.hold), _hold(alert.keep))
        for symptom in all_symptoms().values()
        for alert in symptom.entries
    }


def found(sign: Sign, common: Mapping[str, str], query: Query) -> Finding:
    """Return the finding for a sign.

    `common` are labels that all alerts of this node have; `query` runs the queries in their texts.
    """
    entry = catalogue()[sign.alert]
    named = sign.part or part(sign.labels, entry.alert.component)
    apart = isinstance(entry.alert, FindingType) and entry.alert.apart
    job = sign.job or sign.labels.get("training_job", "")
    if isinstance(entry.alert, FindingType):
        labels = {
            "node": common["node"],
            "part": named,
            "reason": sign.labels.get("reason", ""),
            "training_job": job,
        }
        detail = sentence.text(entry.alert.says, labels, sign.value)
        step = sentence.text(entry.alert.step, labels, sign.value)
    else:
        detail, step = _texts(entry.alert, {**common, **sign.labels}, sign.value, query)
    return Finding(
        slug=entry.slug,
        alert=sign.alert,
        severity=State.WARNING if sign.mild else State(entry.alert.severity),
        component=entry.alert.component,
        part=named,
        summary=entry.alert.summary,
        detail=detail,
        first_step=step,
        runbook=RUNBOOKS + entry.slug,
        reason=sign.labels.get("reason", ""),
        value=sign.value,
        limit=sign.limit,
        source=sign.source,
        limit_source=sign.limit_source,
        since=sign.since,
        hold_seconds=entry.hold_seconds if sign.hold is None else sign.hold,
        keep_seconds=entry.keep_seconds if sign.keep is None else sign.keep,
        training_job=job,
        variant=sign.labels.get("reason", "") if apart else "",
    )


def unread(source: str, part: str, reason: str, detail: str, node: str) -> Finding:
    """Return the finding that a source, or one part of it, could not be read."""
    entry = catalogue()["DshealthdCollectorFailing"]
    labels = {"node": node, "part": part or source, "reason": reason, "training_job": ""}
    kind = cast("FindingType", entry.alert)
    return Finding(
        slug=entry.slug,
        alert=kind.name,
        severity=State.UNKNOWN,
        component="node",
        part=part or source,
        origins=(source,),
        summary=f"{part} could not be read" if part else "A source could not be read",
        reason=reason,
        detail=f"{source}: {detail}",
        first_step=sentence.text(kind.step, labels, None),
        runbook=RUNBOOKS + entry.slug,
        source="dshealthd_collector_failing",
        hold_seconds=entry.hold_seconds,
    )


def starting(sources: tuple[str, ...], node: str) -> Finding:
    """Return the finding that some collectors have not run yet."""
    entry = catalogue()["DshealthdCollectorFailing"]
    return Finding(
        slug=entry.slug,
        alert="",
        severity=State.UNKNOWN,
        component="node",
        part="",
        origins=sources,
        summary="The agent has not read all sources yet",
        detail=f"not read yet: {', '.join(sources)}",
        first_step=f"wait a few seconds; if it persists, read `journalctl -u dshealthd` on {node}",
        runbook=RUNBOOKS + entry.slug,
        source="dshealthd_collector_failing",
        hold_seconds=entry.hold_seconds,
    )


def part(labels: Mapping[str, str], component: str) -> str:
    """Return the display name of the part that these labels name; empty for the node itself."""
    if labels.get("gpu") and component != "job":
        return f"GPU {labels['gpu']}"
    if labels.get("device"):
        return f"{labels['device']}/{labels.get('port', '')}"
    if component == "gpu" and labels.get("pci"):
        return f"GPU {labels['pci']}"
    for key in ("path", "training_job", "part", "nvswitch", "file", "worker"):
        if labels.get(key):
            return labels[key]
    return ""


def _texts(
    alert: Alert, labels: Mapping[str, str], value: float | None, query: Query
) -> tuple[str, str]:
    """Return an alert's description without its first step, and the first step."""
    try:
        text = " ".join(render(alert.description, labels, value, query).split())
    except (TemplateError, TypeError, ValueError, KeyError, IndexError):
        return alert.summary, first_step(alert)
    detail, _, step = text.partition(FIRST_STEP)
    return detail.strip(), step.strip() or first_step(alert)


def _hold(text: str) -> float:
    return float(
        sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))
    )
