"""Turns signs into findings, with the severity, wording and first step of their symptom."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.options import Duration
from dshealthd.findings.finding import Finding, Sign, State
from dshealthd.findings.limits import Limits, source
from dshealthd.findings.series import DEFAULTS, metric_name
from dshealthd.symptoms import all_symptoms, sentence

if TYPE_CHECKING:
    from dshealthd.symptoms.entry import FindingType

FAILING = "DshealthdCollectorFailing"
RUNBOOKS = "/runbooks/"
"""URL path under which every agent serves the runbooks, by slug."""


class CatalogueEntry(NamedTuple):
    """The parts of a finding's type and its symptom that findings use."""

    slug: str
    type: FindingType
    hold_seconds: float
    keep_seconds: float
    page_seconds: float


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return all types of findings by the name of their alert.

    The first call reads the package's files: make it before the event loop runs.
    """
    return {
        kind.name: CatalogueEntry(
            symptom.slug,
            kind,
            *(Duration.parse(text or "0s") for text in (kind.hold, kind.keep, kind.page_after)),
        )
        for symptom in all_symptoms().values()
        for kind in symptom.findings
    }


def finding_of(sign: Sign, node: str, limits: Limits, rule: str = "") -> Finding:
    """Return the finding for a sign that a rule of this name saw on a node."""
    entry = catalogue()[sign.alert]
    kind = entry.type
    named = sign.part or part_name(sign.labels, kind.component) or sign.job
    labels = {"node": node, "part": named, "reason": sign.reason, "training_job": sign.job}
    limit, limit_source = sign.limit, sign.limit_source
    if isinstance(limit, str):
        limit_source, limit = source(limit), float(getattr(limits, limit))
    step = kind.first_step(sign.case or sign.reason)
    return Finding(
        slug=entry.slug,
        alert=sign.alert,
        severity=State.WARNING if sign.mild else State(kind.severity),
        component=kind.component,
        part=named,
        summary=kind.summary,
        detail=sentence.text(kind.says, labels, sign.value),
        first_step=sentence.text(step, labels, sign.value),
        runbook=RUNBOOKS + entry.slug,
        reason=sign.reason,
        value=sign.value,
        limit=limit,
        source=sign.source and metric_name(sign.source),
        limit_source=limit_source,
        since=sign.since,
        hold_seconds=entry.hold_seconds if sign.hold is None else sign.hold,
        keep_seconds=entry.keep_seconds if sign.keep is None else sign.keep,
        page_seconds=entry.page_seconds if sign.hold is None else sign.hold,
        rule=rule,
        training_job=sign.job,
        variant=sign.apart,
    )


def unread(source: str, part: str, reason: str, detail: str, node: str) -> Finding:
    """Return the finding that a source, or one part of it, could not be read."""
    sign = Sign(FAILING, reason, part=part or source, source="collector_failing")
    return dataclasses.replace(
        finding_of(sign, node, DEFAULTS),
        severity=State.UNKNOWN,
        origins=(source,),
        summary=f"{part} could not be read" if part else "A source could not be read",
        detail=f"{source}: {detail}",
    )


def starting_finding(why: str, sources: tuple[str, ...], node: str) -> Finding:
    """Return the finding that the node has not been judged yet: `why`, and the collectors that have
    not run.
    """
    return dataclasses.replace(
        unread("", "", "", "", node),
        alert="",
        origins=sources,
        summary="The agent has not read all sources yet",
        detail=why,
        first_step=f"wait a few seconds; if it persists, read `journalctl -u dshealthd` on {node}",
    )


def part_name(labels: Mapping[str, str], component: str) -> str:
    """Return the display name of the part that these labels name; empty for the node itself."""
    if labels.get("gpu") and component != "job":
        return f"GPU {labels['gpu']}"
    if labels.get("device"):
        return "/".join(filter(None, (labels["device"], labels.get("port"))))
    if component == "gpu" and labels.get("pci"):
        return f"GPU {labels['pci']}"
    for key in ("path", "training_job", "part", "nvswitch", "file", "worker", "disk"):
        if labels.get(key):
            return labels[key]
    return ""
