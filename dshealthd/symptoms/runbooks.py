"""The rendered runbooks: what to do now first, a heading for each alert, no front matter.

`docs/runbooks/SLUG.md`, the agent's `/runbooks/SLUG` and `dshealthd doctor --runbook SLUG` are this
text. An alert's link ends in the anchor of its heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.entry import ADVICE, FIRST_STEP, Alert, FindingType, Symptom

PLACE = "SLUG"
"""Placeholder for the symptom in the URL of the runbooks."""
_TEMPLATE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_LABEL = re.compile(r"\s*\$labels\.(\w+)\s*")
_FIELD = re.compile(r"\{(\w+)(?::[^{}]+)?\}")
_PLACES = {"training_job": "JOB", "instance": "NODE:10061", "mig_uuid": "MIG"}
"""Placeholders for label values that differ from the label in capitals."""
_NOTES = {
    r"\b[Dd]rain\b": (
        "*Drain*: no new job starts on the node, and those that run there go on. Slurm: "
        "`scontrol update nodename=NODE state=drain reason=TEXT`; Kubernetes: `kubectl cordon "
        "NODE`, as `kubectl drain` would end its pods. A reset, a reboot or a power cycle ends "
        "whatever still runs there."
    ),
    r"(systemctl \w+|journalctl -u) dshealthd|py-spy|"
    r"dshealthd (evidence|history|jobs|keys|maintenance|doctor --only|probe --hostfile)\b": (
        "In Kubernetes, the agent is a pod of the namespace `dshealthd`: `kubectl -n dshealthd "
        "get pods -o wide`, `kubectl -n dshealthd logs POD`, `kubectl -n dshealthd exec POD -- "
        "COMMAND`; a restart is `kubectl -n dshealthd delete pod POD`."
    ),
    r"dshealthd probe --hostfile": (
        "In Kubernetes, a hostfile has the nodes' addresses, by which the probes know them."
    ),
}
"""What to know where first steps, remedies or confirmations have these words."""
_SEVERITIES = {
    "critical": "page",
    "warning": "ticket",
    "info": "dashboard only",
    "none": "always firing",
}


_PAGES = {
    "always": "page",
    "job": "page if a training job uses the part, otherwise ticket",
    "many": "ticket; page if many nodes with training jobs have it at once",
    "never": "ticket",
}


def url(base: str, slug: str) -> str:
    """Return the URL of a runbook: `base` with SLUG replaced, or else with `/slug.md` appended."""
    if PLACE in base:
        return base.replace(PLACE, slug)
    return f"{base.rstrip('/')}/{slug}.md"


def anchor(alert: Alert | FindingType) -> str:
    """Return the anchor of an alert's heading, as GitHub and GitLab generate it."""
    return alert.name.lower()


def first_step(alert: Alert) -> str:
    """Return the runbook's first step for an alert, with NODE, GPU and so on in place of its
    labels.

    Raise ValueError if the step depends on labels and the alert has no `act`.
    """
    if alert.act:
        return alert.act
    if alert.step:
        return step(alert)
    _, _, told = alert.description.partition(FIRST_STEP)
    plain = _TEMPLATE.sub(_placeholder, told.replace("\\\n", "")).strip()
    if "{{" in plain or not plain:
        message = f"{alert.name}: its first step depends on labels; `act` must say what to do"
        raise ValueError(message)
    return plain[0].upper() + plain[1:]


def step(entry: FindingType | Alert) -> str:
    """Return the runbook's first step for a finding, with NODE, PART and so on in place of
    labels.
    """
    if not entry.steps:
        return _plain(entry.step)
    causes: dict[str, list[str]] = {}
    for cause, text in entry.steps.items():
        causes.setdefault(text, []).append(f"*{cause}*")
    cases = [f"- {', '.join(known)}: {_plain(text)}" for text, known in causes.items()]
    return "\n".join(
        ["By the cause in the alert:", "", *cases, f"- otherwise: {_plain(entry.step)}"]
    )


def _plain(text: str) -> str:
    plain = _FIELD.sub(lambda match: _PLACES.get(match[1], match[1].upper()), text)
    return plain[0].upper() + plain[1:]


def _placeholder(template: re.Match[str]) -> str:
    label = _LABEL.fullmatch(template[1])
    return template[0] if label is None else _PLACES.get(label[1], label[1].upper())


def named(slug: str) -> str:
    """Return the runbook of this name; LookupError, which lists all names, if there is none."""
    known = all_symptoms()
    if slug not in known:
        message = f"--runbook: no runbook is called {slug!r}; there are {', '.join(known)}"
        raise LookupError(message)
    return render(known[slug])


def render(symptom: Symptom) -> str:
    """Return the runbook of a symptom as Markdown."""
    return "\n".join(_lines(symptom)).rstrip("\n") + "\n"


def _lines(symptom: Symptom) -> Iterator[str]:
    yield f"# {symptom.title}"
    yield ""
    # A finding and an alert, or two alerts, of one name are one thing under two points of view.
    alerts: dict[str, list[str]] = {}
    for alert in symptom.entries:
        owner = " to the job's owner" if alert.audience == "owner" else ""
        text = step(alert) if isinstance(alert, FindingType) else first_step(alert)
        alerts.setdefault(alert.name, []).extend(
            (f"{alert.summary} ({_told(alert)}{owner}).", "", text, "")
        )
    if alerts:
        yield "## What to do now"
        yield ""
        for name, texts in alerts.items():
            yield f"### {name}"
            yield from texts
        known = f"{alerts} {symptom.sections['Remedy']} {symptom.sections['Confirm']}"
        notes = [note for words, note in _NOTES.items() if re.search(words, known)]
        if re.search("NODE|GPU|JOB|PART", f"{alerts} {notes}"):
            notes.insert(0, "`NODE`, `GPU`, `JOB` and `PART` stand for the labels of the alert.")
        for note in notes:
            yield note
            yield ""
    yield from _section("Remedy", symptom)
    yield from _section("Confirm", symptom)
    yield from _section("Meaning", symptom)
    if ADVICE in symptom.sections:
        yield from _section(ADVICE, symptom)


def _told(entry: Alert | FindingType) -> str:
    """Return whom an alert reaches, in words."""
    if not isinstance(entry, FindingType):
        return _SEVERITIES[entry.severity] + (" or ticket" if entry.ticket else "")
    if entry.page_after:
        return f"page if certain; otherwise a ticket, and a page after {entry.page_after}"
    return _PAGES[entry.page]


def _section(name: str, symptom: Symptom) -> Iterator[str]:
    yield f"## {name}"
    yield symptom.sections[name]
    yield ""
