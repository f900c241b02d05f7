"""One symptom: its findings, its alerts and its runbook, from TOML front matter and Markdown.

A file is `+++`, TOML, `+++`, and the runbook in sections `## Meaning`, `## Confirm`, `## Remedy`
and, if common advice is wrong or incomplete, `## Common advice, checked`.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dshealthd.core.options import unknown
from dshealthd.symptoms import sentence

if TYPE_CHECKING:
    from collections.abc import Iterator

SEVERITIES = ("critical", "warning", "info")
"""A page, a ticket, and a dashboard entry only.

`none` is the Watchdog's severity: that alert proves that alerts arrive.
"""
COMPONENTS = ("node", "gpu", "nic", "link", "nvlink_domain", "leaf", "path", "job", "fleet")
AUDIENCES = ("operator", "owner")
"""Who can fix it: the operator of the cluster, or the owner of the training job."""
MEANS = ("alert", "doctor", "explain", "job")
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
_DURATION = re.compile(r"(?:\d+h)?(?:\d+m)?(?:\d+s)?")
_ALERT_NAME = re.compile(r"Dshealthd(?:[A-Z][A-Za-z0-9]*)+")


class EntryError(ValueError):
    """A symptom's file is wrong; the message has all its errors, one per line, with the file's name."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert rule of a symptom."""

    name: str
    severity: str
    component: str
    """The kind of part it concerns, one of COMPONENTS; a label used for inhibition."""
    expr: str
    summary: str
    """What is broken, without templates, so that all alerts of one name can share it as a title."""
    description: str
    """Which part, why, and the first step; a Prometheus template."""
    hold: str = ""
    """How long the expression must hold, `for` in the file; empty if it fires at once."""
    keep: str = ""
    """How long it keeps firing after the expression stops holding, `keep_firing_for` in the file.

    Empty: rules.KEEP_FIRING.
    """
    audience: str = "operator"
    """Who can fix it, one of AUDIENCES."""
    act: str = ""
    """What to do now, for the runbook, if the description's first step depends on labels."""
    every: str = ""
    """Evaluation interval, if longer than usual because the expression reads many series or much
    history.
    """
    symptom: str = ""
    """The label `symptom`, a template, of an alert that stands for those of other symptoms."""
    ticket: str = ""
    """The expression under which an alert that is a page otherwise is a ticket."""
    ticket_hold: str = ""
    """How long that one must hold, `ticket_for` in the file."""

    @property
    def severities(self) -> str:
        """The severities that its rules have, in words."""
        return f"{self.severity} or warning" if self.ticket else self.severity


PAGES = ("always", "job", "never")
"""When a finding is a page rather than a ticket: always, where a training job uses the part, never."""


@dataclass(frozen=True, kw_only=True)
class FleetRule:
    """How several nodes decide together whether there is an alert for a finding, and where."""

    expr: str
    """Reads the nodes' findings as `dshealthd_finding{FINDING}`, and may read more.

    Its result has the labels that the finding's sentences name.
    """
    ticket: str = ""
    """The expression under which a finding that is a page otherwise is a ticket."""
    description: str = ""
    """What Prometheus can say of several nodes, as a template, in place of the finding's `says`."""
    hold: str = ""
    """How long the expression must hold, `for` in the file."""
    keep: str = ""
    """How long it keeps firing, `keep_firing_for` in the file. Empty: rules.KEEP_FIRING."""
    every: str = ""
    """Evaluation interval, if longer than usual."""


@dataclass(frozen=True, kw_only=True)
class FindingType:
    """One finding of a symptom, which the agent judges; an alert of the same name reports it."""

    name: str
    """The alert's name; the label `finding` is the same without `Dshealthd`."""
    component: str
    """The kind of part it concerns, one of COMPONENTS."""
    page: str
    """One of PAGES."""
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
    audience: str = "operator"
    """Who can fix it, one of AUDIENCES."""
    steps: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What to do first in some cases, in place of `step`; the rule's labels `reason`, or else
    `class`, tell the case.
    """
    rule: FleetRule | None = None
    """How several nodes decide; None if the alert is each node's finding."""

    @property
    def severity(self) -> str:
        """`critical` if it stops or corrupts training, so that it may be a page."""
        return "warning" if self.page == "never" else "critical"

    @property
    def severities(self) -> str:
        """The severities that its alert may have, in words."""
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
    waits_for: str = ""
    """Signals that do not exist yet, without which the alert is missing or incomplete."""
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
        """All that alerts come from."""
        return (*self.findings, *self.alerts)


def parse(slug: str, text: str) -> Symptom:
    """Return the symptom that a file describes; raise EntryError if it is wrong."""
    match = _FENCE.fullmatch(text)
    if match is None:
        message = f"{slug}.md: must begin with +++, TOML and +++, each fence on a line of its own"
        raise EntryError(message)
    try:
        table = tomllib.loads(match[1])
    except tomllib.TOMLDecodeError as error:
        message = f"{slug}.md: is not TOML: {error}"
        raise EntryError(message) from error
    rows, found = _tables(slug, table, "alerts"), _tables(slug, table, "findings")
    errors = [f"{slug}.md: {error}" for error in _wrong(table, rows, found, match[2])]
    if errors:
        raise EntryError("\n".join(errors))
    alerts = (Alert(**_fields(row)) for row in rows)
    findings = (_finding(row) for row in found)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    return Symptom(
        slug=slug,
        findings=tuple(findings),
        alerts=tuple(alerts),
        sections=_sections(match[2]),
        **values,
    )


def _tables(slug: str, table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Take an array of tables out of a symptom's table."""
    rows = table.pop(key, [])
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        message = f"{slug}.md: {key}: must be [[{key}]] tables"
        raise EntryError(message)
    return rows


_KEYS = {"hold": "for", "keep": "keep_firing_for", "ticket_hold": "ticket_for"}
"""Fields of a rule whose key in the file differs, because it is Prometheus' own word."""
_FIELDS = {key: name for name, key in _KEYS.items()}


def _fields(row: Mapping[str, str]) -> dict[str, str]:
    return {_FIELDS.get(key, key): value.strip() for key, value in row.items()}


def _finding(row: Mapping[str, Any]) -> FindingType:
    own: dict[str, Any] = {
        key: value.strip() for key, value in row.items() if isinstance(value, str)
    }
    if "rule" in row:
        own["rule"] = FleetRule(**_fields(row["rule"]))
    own["steps"] = MappingProxyType(dict(row.get("steps", {})))
    return FindingType(**own)


_OF_SYMPTOM: Mapping[str, type] = {
    "row": int,
    "title": str,
    "means": list,
    "waits_for": str,
    "covered_by": list,
}
_MISSING = dataclasses.MISSING
_OF_ALERT, _OF_RULE = (
    {_KEYS.get(each.name, each.name): each.default is _MISSING for each in dataclasses.fields(kind)}
    for kind in (Alert, FleetRule)
)
"""Keys of an alert and of a finding's rule, and whether they are required."""
_OF_FINDING = {
    each.name: each.default is _MISSING and each.default_factory is _MISSING
    for each in dataclasses.fields(FindingType)
}
"""The same of a finding."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "severity": SEVERITIES,
    "component": COMPONENTS,
    "audience": AUDIENCES,
    "page": PAGES,
}
_WATCHDOG = "severity", "none"
_DURATIONS = frozenset(
    ("for", "keep_firing_for", "every", "hold", "keep", "page_after", "ticket_for")
)


def _wrong(
    table: Mapping[str, Any], rows: list[dict[str, Any]], findings: list[dict[str, Any]], body: str
) -> Iterator[str]:
    for key, value in table.items():
        if key not in _OF_SYMPTOM:
            yield f"{key}: {unknown(key, _OF_SYMPTOM)}"
        elif type(value) is not _OF_SYMPTOM[key]:
            yield f"{key}: must be {_OF_SYMPTOM[key].__name__}, not {type(value).__name__}"
        elif isinstance(value, list):
            if not all(isinstance(item, str) for item in value):
                yield f"{key}: must be strings"
            elif key == "means":
                yield from (
                    f'means: "{item}" is not one of {", ".join(MEANS)}'
                    for item in value
                    if item not in MEANS
                )
    if not table.get("title"):
        yield "title: is missing"
    for place, row in enumerate(rows):
        yield from (f"alerts[{place}].{error}" for error in _wrong_alert(row, _OF_ALERT))
    for place, row in enumerate(findings):
        yield from (f"findings[{place}].{error}" for error in _wrong_alert(row, _OF_FINDING))
    sections = _sections(body)
    yield from (f"section ## {name} is missing" for name in SECTIONS if not sections.get(name))
    yield from (
        f"section ## {name} is unknown" for name in sections if name not in (*SECTIONS, ADVICE)
    )


def _wrong_alert(row: Mapping[str, Any], keys: Mapping[str, bool]) -> Iterator[str]:
    """Yield the mistakes in an alert or a finding, which have these keys, required or not."""
    for key, value in row.items():
        if key not in keys:
            yield f"{key}: {unknown(key, keys)}"
        elif key in {"rule", "steps"}:
            known = _OF_RULE if key == "rule" else dict.fromkeys(value, False)
            yield from (f"{key}.{error}" for error in _wrong_alert(value, known))
            if key == "steps":
                yield from (f"steps.{error}" for error in _wrong_sentences(value))
        elif not isinstance(value, str) or not value.strip():
            yield f"{key}: must be a string that is not empty"
        elif key in _DURATIONS and not _DURATION.fullmatch(value):
            yield f'{key}: "{value}" is not a duration such as "5s", "10m" or "1h"'
        elif key == "name" and not _ALERT_NAME.fullmatch(value):
            yield f'name: "{value}" is not Dshealthd and words in CamelCase'
        elif key in _CHOICES and value not in _CHOICES[key] and (key, value) != _WATCHDOG:
            yield f'{key}: "{value}" is not one of {", ".join(_CHOICES[key])}'
        elif key == "summary" and "{" in value:
            yield "summary: must hold no template"
        elif key in {"says", "step"}:
            yield from _wrong_sentences({key: value})
    yield from (f"{key}: is missing" for key, needed in keys.items() if needed and key not in row)


def _wrong_sentences(texts: Mapping[str, str]) -> Iterator[str]:
    for key, text in texts.items():
        try:
            sentence.template(text)
        except sentence.SentenceError as error:
            yield f"{key}: {error}"


def _sections(body: str) -> dict[str, str]:
    """Return a symptom's body by its second-level headings, ignoring `##` inside code blocks."""
    hidden = _CODE.sub(lambda block: re.sub("[^\n]", " ", block[0]), body)
    headings = list(_HEADING.finditer(hidden))
    ends = [*(heading.start() for heading in headings), len(body)][1:]
    return {
        heading[1]: body[heading.end() : end].strip()
        for heading, end in zip(headings, ends, strict=True)
    }
