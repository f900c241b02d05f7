"""One symptom: its findings, its alerts and its runbook, from TOML front matter and Markdown.

A file is `+++`, TOML, `+++`, and the runbook in sections `## Meaning`, `## Confirm`, `## Remedy`
and, if common advice is wrong or incomplete, `## Common advice, checked`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from dshealthd.symptoms import sentence

COMPONENTS = ("node", "gpu", "nic", "link", "leaf", "path", "job", "fleet")
SECTIONS = ("Meaning", "Confirm", "Remedy")
ADVICE = "Common advice, checked"
"""The optional section that checks what articles recommend against the libraries."""
RULESET = {"ruleset": "dshealthd"}
"""The label of every alert of ours and of no other: routes, inhibition and silences require it.

`service` and `job` would not do: targets have them, so another team's alert about an agent or its
pod would pass for ours.
"""
FIRST_STEP = "First step: "
"""The words in a description that introduce what to do."""
PARTS = frozenset(
    {
        "agent-gone",
        "bad-link",
        "checkpoint-path",
        "disk-full",
        "gpu-lost",
        "nccl-all-reduce-failed",
        "nvml-broken",
    }
)
"""Symptoms whose pages for a part of a node also cover the hangs that the fault causes.

`dshealthd:job:struck` suppresses the page of such a job, so the page of the part names the job.
"""
PART_COMPONENTS = frozenset({"node", "gpu", "nic", "path"})
_FENCE = re.compile(r"\+\+\+\n(.*?)^\+\+\+\n(.*)", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^## +(.+?) *$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_FIELDS = {"for": "hold", "keep_firing_for": "keep", "ticket_for": "ticket_hold"}
"""Keys of a rule that are Prometheus' own words, and the fields that they fill."""


class EntryError(ValueError):
    """A symptom's file is wrong; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class FleetRule:
    """How several nodes decide together whether there is an alert for a finding, and where."""

    expr: str = ""
    """Of a finding, it reads those of the nodes as `dshealthd_finding{FINDING}`, and may read more;
    its result has the labels that the finding's sentences name, unless `places` do. Empty: as
    without a rule.
    """
    places: str = ""
    """A query for the places that the sentences of a job's alert are about, of which they name the
    first. FINDING, JOB and NODE select those of the alert.
    """
    ticket: str = ""
    """The expression under which what is a page otherwise is a ticket."""
    case: str = ""
    """A template of the case for `steps`, `$case` in the description, if no label of the rule is
    it: what may change while the alert remains the same.
    """
    description: str = ""
    """What Prometheus can say of several nodes, as a template, in place of the finding's `says`."""
    hold: str = ""
    """How long the expression must hold, `for` in the file; empty if it fires at once."""
    keep: str = ""
    """How long it keeps firing after the expression stops holding, `keep_firing_for` in the file.

    Empty: rules.KEEP_FIRING.
    """
    every: str = ""
    """Evaluation interval, if longer than usual because the expression reads many series or much
    history.
    """


@dataclass(frozen=True, kw_only=True)
class Alert(FleetRule):
    """One alert rule of a symptom."""

    name: str
    severity: Literal["critical", "warning", "info", "none"]
    """A page, a ticket, a dashboard entry only; `none` for the Watchdog, which proves that alerts
    arrive.
    """
    component: str
    """The kind of part it concerns, one of COMPONENTS; a label used for inhibition."""
    expr: str = field()
    """In PromQL."""
    summary: str
    """What is broken, without templates, so that all alerts of one name can share it as a title."""
    description: str = field()
    """Which part, why, and the first step; a Prometheus template."""
    audience: Literal["operator", "owner"] = "operator"
    """Who can fix it: the operator of the cluster, or the owner of the training job."""
    act: str = ""
    """What to do now, for the runbook, if the description's first step depends on labels."""
    step: str = ""
    """What to do first, as a sentence, if it is not part of the description."""
    steps: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What to do first by the label `reason`, in place of `step`."""
    symptom: str = ""
    """The label `symptom`, a template, of an alert that stands for those of other symptoms."""
    ticket_hold: str = ""
    """How long the expression of its ticket must hold, `ticket_for` in the file."""

    @property
    def severities(self) -> str:
        """The severities that the alert's rules have, in words."""
        return f"{self.severity} or warning" if self.ticket else self.severity


@dataclass(frozen=True, kw_only=True)
class FindingType:
    """One finding of a symptom, which the agent judges; an alert of the same name reports it."""

    name: str
    """The alert's name; the label `finding` is the same without `Dshealthd`."""
    component: str
    """The kind of part it concerns, one of COMPONENTS."""
    page: Literal["always", "job", "many", "never"]
    """When it is a page rather than a ticket: always, where a training job uses the part, where
    many nodes with training jobs have it at once, never.
    """
    summary: str
    """What is broken, as a title."""
    says: str
    """Which part, why and what follows, as a sentence (`sentence.py`)."""
    step: str
    """What to do first, as a sentence."""
    hold: str = ""
    """How long its sign must last, as a duration."""
    keep: str = ""
    """How long it remains after its sign is gone."""
    page_after: str = ""
    """How long its sign must last before a ticket becomes a page; empty: a page at once."""
    hardware: tuple[str, ...] = ()
    """How its reasons begin of which a part of this very node is the cause, so that they count
    where nodes are compared by their records: not what a cable, a switch, heat or software may
    cause.
    """
    audience: Literal["operator", "owner"] = "operator"
    """Who can fix it: the operator of the cluster, or the owner of the training job."""
    steps: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What to do first in some cases, in place of `step`, by how the rule's label `reason` begins,
    or else `class`.
    """
    rule: FleetRule | None = None
    """How several nodes decide; None if the alert is each node's finding, or that of a job, however
    many of its nodes find it.
    """

    def first_step(self, case: str) -> str:
        """Return the first step of a finding, or that of one of its cases."""
        return next(
            (step for known, step in self.steps.items() if case.startswith(known)), self.step
        )

    @property
    def severity(self) -> str:
        """`critical` if it stops or corrupts training, so that it may be a page."""
        return "warning" if self.page in {"many", "never"} else "critical"

    @property
    def severities(self) -> str:
        """The severities that the finding's alert may have, in words."""
        both = self.page == "job" or self.page_after or (self.rule and self.rule.ticket)
        return "critical or warning" if both else self.severity


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """A symptom: its findings, its alerts and its runbook."""

    slug: str
    title: str
    row: int | None = None
    """Row in the symptom table; None for the monitor's own problems."""
    means: tuple[str, ...] = ()
    covered_by: tuple[str, ...] = ()
    """Slugs of the symptoms whose alerts also cover this one."""
    findings: tuple[FindingType, ...] = ()
    """What the agent judges."""
    alerts: tuple[Alert, ...] = ()
    """What several nodes show together."""
    sections: Mapping[str, str]
    """The runbook by heading, in order."""

    @property
    def entries(self) -> tuple[FindingType | Alert, ...]:
        """The symptom's findings and alerts."""
        return (*self.findings, *self.alerts)


def parse(slug: str, text: str) -> Symptom:
    """Return the symptom that a file describes; raise EntryError if it is wrong."""
    match = _FENCE.fullmatch(text)
    if match is None:
        message = f"{slug}.md: must begin with +++, TOML and +++, each fence on a line of its own"
        raise EntryError(message)
    try:
        table = tomllib.loads(match[1])
        findings = tuple(map(_finding, table.pop("findings", ())))
        alerts = tuple(Alert(**_fields(row)) for row in table.pop("alerts", ()))
        table |= {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
        return Symptom(
            slug=slug, findings=findings, alerts=alerts, sections=_sections(match[2]), **table
        )
    # No TOML, an unknown or missing key.
    except (ValueError, ArithmeticError, TypeError, AttributeError) as error:
        raise EntryError(f"{slug}.md: {error}") from error


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _FIELDS.get(key, key): MappingProxyType(value) if isinstance(value, dict) else value.strip()
        for key, value in row.items()
    }


def _finding(row: Mapping[str, Any]) -> FindingType:
    own: dict[str, Any] = {
        key: value.strip() for key, value in row.items() if isinstance(value, str)
    }
    if "hardware" in row:
        own["hardware"] = tuple(row["hardware"])
    if "rule" in row:
        own["rule"] = FleetRule(**_fields(row["rule"]))
    own["steps"] = MappingProxyType(dict(row.get("steps", {})))
    for text in (own["says"], own["step"], *own["steps"].values()):
        sentence.template(text)
    return FindingType(**own)


def _sections(body: str) -> dict[str, str]:
    """Return a symptom's body by its second-level headings, ignoring `##` inside code blocks."""
    hidden = _CODE.sub(lambda block: re.sub("[^\n]", " ", block[0]), body)
    headings = list(_HEADING.finditer(hidden))
    ends = [*(heading.start() for heading in headings), len(body)][1:]
    return {
        heading[1]: body[heading.end() : end].strip()
        for heading, end in zip(headings, ends, strict=True)
    }
