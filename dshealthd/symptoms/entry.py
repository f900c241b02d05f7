"""One symptom: its alerts and its runbook, from TOML front matter and Markdown.

A file is `+++`, TOML, `+++`, and the runbook in sections `## Meaning`, `## Confirm`, `## Remedy`
and, where advice that circulates is wrong or lacks something, `## Common advice, checked`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SEVERITIES = ("critical", "warning", "info")
"""Somebody is woken, somebody gets a ticket, it is shown on a dashboard.

`none` is the Watchdog's, which tells that alerts arrive.
"""
COMPONENTS = ("node", "gpu", "nic", "link", "nvlink_domain", "leaf", "path", "job", "fleet")
AUDIENCES = ("operator", "owner")
"""Who can repair it: whoever runs the cluster, or the owner of the training job."""
MEANS = ("alert", "doctor", "explain", "job")
SECTIONS = ("Meaning", "Confirm", "Remedy")
ADVICE = "Common advice, checked"
"""What articles recommend, tried against the libraries; optional."""
FIRST_STEP = "First step: "
"""What a description says before what to do."""
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
"""Symptoms whose pages for a part of a node stand for the hangs that follow from it.

`dshealthd:job:struck` leaves out the page of such a job, so that of the part names the job.
"""
PART_COMPONENTS = frozenset({"node", "gpu", "nic", "path"})
_JOBS = (
    '{{ with printf `dshealthd_job_info{cluster="%s", node="%s"}` $labels.cluster $labels.node'
    " | query }}Training jobs on {{ $labels.node }}:{{ range . }} {{ .Labels.exported_job }}"
    "{{ end }}. {{ end }}"
)

_FENCE = re.compile(r"\+\+\+\n(.*?)^\+\+\+\n(.*)", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^## +(.+?) *$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_DURATION = re.compile(r"(?:\d+h)?(?:\d+m)?(?:\d+s)?")
_ALERT_NAME = re.compile(r"Dshealthd(?:[A-Z][A-Za-z0-9]*)+")


class EntryError(ValueError):
    """A symptom's file is wrong; every error of it, one a line, with the file's name."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert rule of a symptom."""

    name: str
    severity: str
    component: str
    """What it is about, one of COMPONENTS; a label by which alerts inhibit one another."""
    expr: str
    summary: str
    """What it is, without templates, so that all alerts of one name can be grouped under it."""
    description: str
    """Which one, why, and the first step; a template of Prometheus."""
    hold: str = ""
    """How long the expression must hold, `for` in the file; empty: it is certain at once."""
    keep: str = ""
    """How long it goes on firing after the expression ceased to hold, `keep_firing_for` in the
    file.

    Empty: as long as rules.KEEP_FIRING says.
    """
    audience: str = "operator"
    """Who can repair it, one of AUDIENCES."""
    act: str = ""
    """What to do now, for the runbook, where the first step in the description depends on labels.
    """
    every: str = ""
    """How often it is evaluated, where that is less often than usual, as reading so many series or
    so much of the past costs.
    """


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """A symptom and what is done about it."""

    slug: str
    title: str
    row: int | None = None
    """Of the symptom table; None for the monitor's own troubles."""
    means: tuple[str, ...] = ()
    waits_for: str = ""
    """The signals that do not exist yet, without which there is no alert, or not the whole of it.
    """
    covered_by: tuple[str, ...] = ()
    """Slugs of the symptoms whose alerts tell of this one too."""
    alerts: tuple[Alert, ...] = ()
    sections: Mapping[str, str]
    """The runbook by heading, in order."""


def parse(slug: str, text: str) -> Symptom:
    """Return the symptom that a file describes; EntryError if it is wrong."""
    match = _FENCE.fullmatch(text)
    if match is None:
        message = f"{slug}.md: must begin with +++, TOML and +++, each fence on a line of its own"
        raise EntryError(message)
    try:
        table = tomllib.loads(match[1])
    except tomllib.TOMLDecodeError as error:
        message = f"{slug}.md: is not TOML: {error}"
        raise EntryError(message) from error
    rows = table.pop("alerts", [])
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        message = f"{slug}.md: alerts: must be [[alerts]] tables"
        raise EntryError(message)
    errors = [f"{slug}.md: {error}" for error in _wrong(table, rows, match[2])]
    if errors:
        raise EntryError("\n".join(errors))
    alerts = (
        _naming_jobs(slug, Alert(**{_field(key): value.strip() for key, value in row.items()}))
        for row in rows
    )
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    return Symptom(slug=slug, alerts=tuple(alerts), sections=_sections(match[2]), **values)


def _naming_jobs(slug: str, alert: Alert) -> Alert:
    """Return an alert of a symptom whose text names the node's jobs where it stands for them."""
    stands_for_jobs = (
        slug in PARTS and alert.severity == "critical" and alert.component in PART_COMPONENTS
    )
    if not stands_for_jobs or "dshealthd_job_info" in alert.description:
        return alert
    reason, _, step = alert.description.partition(FIRST_STEP)
    return dataclasses.replace(alert, description=f"{reason}{_JOBS}{FIRST_STEP}{step}")


_KEYS = {"hold": "for", "keep": "keep_firing_for"}
"""Fields whose key in the file is another: Prometheus' own word for it."""
_FIELDS = {key: field for field, key in _KEYS.items()}


def _field(key: str) -> str:
    return _FIELDS.get(key, key)


_OF_SYMPTOM: Mapping[str, type] = {
    "row": int,
    "title": str,
    "means": list,
    "waits_for": str,
    "covered_by": list,
}
_OF_ALERT = {
    _KEYS.get(field.name, field.name): field.default is dataclasses.MISSING
    for field in dataclasses.fields(Alert)
}
"""Keys of an alert, and whether it must have them."""


def _wrong(table: Mapping[str, Any], rows: list[dict[str, Any]], body: str) -> Iterator[str]:
    for key, value in table.items():
        if key not in _OF_SYMPTOM:
            yield _unknown(key, _OF_SYMPTOM)
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
        yield from (f"alerts[{place}].{error}" for error in _wrong_alert(row))
    sections = _sections(body)
    yield from (f"section ## {name} is missing" for name in SECTIONS if not sections.get(name))
    yield from (
        f"section ## {name} is unknown" for name in sections if name not in (*SECTIONS, ADVICE)
    )


def _wrong_alert(row: Mapping[str, Any]) -> Iterator[str]:
    for key, value in row.items():
        if key not in _OF_ALERT:
            yield _unknown(key, _OF_ALERT)
        elif not isinstance(value, str) or not value.strip():
            yield f"{key}: must be a string that is not empty"
        elif key in {"for", "keep_firing_for", "every"} and not _DURATION.fullmatch(value):
            yield f'{key}: "{value}" is not a duration such as "5s", "10m" or "1h"'
        elif key == "name" and not _ALERT_NAME.fullmatch(value):
            yield f'name: "{value}" is not Dshealthd and words in CamelCase'
        elif key == "severity" and value not in (*SEVERITIES, "none"):
            yield f'severity: "{value}" is not one of {", ".join(SEVERITIES)}'
        elif key == "component" and value not in COMPONENTS:
            yield f'component: "{value}" is not one of {", ".join(COMPONENTS)}'
        elif key == "audience" and value not in AUDIENCES:
            yield f'audience: "{value}" is not one of {", ".join(AUDIENCES)}'
        elif key == "summary" and "{{" in value:
            yield "summary: must hold no template"
    yield from (
        f"{key}: is missing" for key, needed in _OF_ALERT.items() if needed and key not in row
    )


def _unknown(key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f"{key}: unknown key; " + (
        f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    )


def _sections(body: str) -> dict[str, str]:
    """Return a symptom's body by its headings of the second level; `##` inside a code block is no
    heading.
    """
    hidden = _CODE.sub(lambda block: re.sub("[^\n]", " ", block[0]), body)
    headings = list(_HEADING.finditer(hidden))
    ends = [*(heading.start() for heading in headings), len(body)][1:]
    return {
        heading[1]: body[heading.end() : end].strip()
        for heading, end in zip(headings, ends, strict=True)
    }
