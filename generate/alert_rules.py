"""The alert rules for Prometheus, generated from the symptoms.

`python -m generate.alert_rules deploy/prometheus` writes `alerts.yml`; with `--check` it
compares and fails if the file differs. Alerts link to the runbooks that agents serve, which need no
internet; `--runbooks URL` links to others. SLUG in the URL stands for the symptom, AGENT for the
address of the agent that an alert is about, or of any that answers. The directory holds the
thresholds, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dshealthd.core.text import MOST_NAMED
from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.entry import (
    COMPONENTS,
    FIRST_STEP,
    PART_COMPONENTS,
    PARTS,
    RULESET,
    EntryError,
)
from dshealthd.symptoms.runbooks import anchor, url
from dshealthd.symptoms.sentence import placeholders, template
from generate import files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.symptoms.entry import Alert, FindingType, Symptom

RUNBOOKS = "https://github.com/dshealthd/dshealthd/blob/main/docs/runbooks"
"""Base URL of the published runbooks, without a trailing slash; the dashboards link there."""
SERVED = "http://AGENT/runbooks/SLUG"
"""URL of the runbooks that agents serve."""
AGENT = "AGENT"
"""Placeholder for an agent's address in the URL of the runbooks."""
ANY_AGENT = (
    '{{ with query "dshealthd:fleet:agent" }}{{ . | first | label "instance" }}'
    "{{ else }}NODE:10061{{ end }}"
)
"""The address of an agent that answers, of which there is one series: each alert asks for it, each
time it is evaluated, and where a thousand nodes are gone there are a thousand alerts."""
OWN_AGENT = "{{ $labels.instance }}"
OWN_OR_ANY_AGENT = (
    f"{{{{ with $labels.instance }}}}{{{{ . }}}}{{{{ else }}}}{ANY_AGENT}{{{{ end }}}}"
)
GONE = "agent-gone"
"""The symptom of an agent that serves nothing."""
KEEP_FIRING = "2m"
"""How long an alert keeps firing after its expression stops holding, unless it sets its own time.

A restarting agent exports nothing for a scrape or a few, and takes longer to rediscover probes and
jobs: without this, every page of its node would resolve and fire again.
"""
MOST_RULES = 20
"""Most rules of a group: Mimir's ruler refuses a group with more, unless told otherwise
(`-ruler.max-rules-per-rule-group`)."""
URGENT = "5s"
"""Evaluation interval of alerts that set none, whatever is global in a Prometheus."""
AT_ONCE = frozenset({"none"})
"""Severities of alerts that do not keep firing."""
MANY = "many"
"""The label of tickets that are a page where many nodes with training jobs have them at once."""
PREFIX = "Dshealthd"
"""What an alert's name has before that of its finding."""
VALUES = "dshealthd_finding_value{FINDING} or Inf * dshealthd_finding{FINDING}"
"""Each node's finding with its value. Where the agent knows none, a sentence says +Inf: it must not
wait for the value. NaN is no sample in MetricsQL: vmalert would drop the alert.
"""
OF_JOB = 'cluster="%[1]s", training_job="%[2]s"'
"""Selects what is of an alert's job, in queries of its text."""
OF_NODE = "%[3]s"
"""The node of an alert that has one, as an expression."""
JOB_ALERT = """\
group by (cluster, training_job) (
  dshealthd_finding{FINDING}
    unless on (cluster, node) dshealthd:node:maintenance_end_timestamp_seconds
)"""
"""One alert for a job, however many of its nodes find it. Its labels stay as they are while nodes
join and leave: if one changed, the alert would resolve and fire anew. Without the label `node`,
Alertmanager cannot hold back what only nodes in maintenance find.
"""
ITS_NODES = (
    "{{ if gt (len $places) 1 }} This shows on {{ len $places }} of its nodes:"
    f"{{{{ range $number, $place := $places }}}}{{{{ if lt $number {MOST_NAMED} }}}}"
    "{{ if $number }},{{ end }} {{ $place.Labels.node }}{{ end }}{{ end }}"
    f"{{{{ if gt (len $places) {MOST_NAMED} }}}} …{{{{ end }}}}.{{{{ end }}}}"
)
"""What a job's alert that names a node says of its others."""
JOBS = (
    '{{ with printf `dshealthd_job_info{cluster="%s", node="%s"}` $labels.cluster $labels.node'
    " | query }}Training jobs on {{ $labels.node }}:{{ range . }} {{ .Labels.training_job }}"
    "{{ end }}. {{ end }}"
)
"""What the page of a part says of the jobs whose hangs it stands for, if no single one is its
own."""
FILE = "alerts.yml"
THRESHOLDS = "thresholds.yml"
"""Hand-written, beside the rules."""
HEADER = """\
# Alerts, generated from dshealthd/symptoms/*.md by `./dev generate`; do not edit.
# Their thresholds are in thresholds.yml; change them there.
"""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line text as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _text)


def rules(symptoms: Iterable[Symptom], thresholds: int, runbooks: str = SERVED) -> str:
    """Return the content of the alert rules' file: groups by component and interval, in the order
    of COMPONENTS and of the symptoms.

    `thresholds` is the number of thresholds that are shipped with the rules.
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for symptom in symptoms:
        for finding in symptom.findings:
            every = finding.rule.every if finding.rule else ""
            groups.setdefault((COMPONENTS.index(finding.component), every), []).extend(
                _finding_rules(symptom, finding, runbooks)
            )
        for alert in symptom.alerts:
            groups.setdefault((COMPONENTS.index(alert.component), alert.every), []).extend(
                _alert_rules(symptom, alert, thresholds, runbooks)
            )
    document = {"groups": list(_groups(groups))}
    return HEADER + yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True
    )


def _groups(groups: dict[tuple[int, str], list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for (component, every), found in sorted(groups.items()):
        for start in range(0, len(found), MOST_RULES):
            number = f"{start // MOST_RULES + 1}" if start else ""
            name = "-".join(filter(None, ("dshealthd", COMPONENTS[component], every, number)))
            rules = found[start : start + MOST_RULES]
            yield {"name": name, "interval": every or URGENT, "rules": rules}


def _finding_rules(
    symptom: Symptom, finding: FindingType, runbooks: str
) -> Iterator[dict[str, Any]]:
    """Yield the alert that reports what agents find: one rule for each severity that it may have.

    The agent has judged it, holds included.
    """
    label, rule = finding.name.removeprefix(PREFIX), finding.rule
    says = (rule and rule.description) or template(finding.says)
    case = (rule and rule.case) or ""
    about_job = finding.component == "job"
    of_job = "" if about_job else "Training job: {{ $labels.training_job }}. "
    stands = rule and symptom.slug in PARTS and finding.component in PART_COMPONENTS
    variants = {
        "always": (
            ("critical", "", JOBS if stands else ""),
            *((("warning", "", ""),) if rule and rule.ticket else ()),
        ),
        "job": (("critical", ', training_job!=""', of_job), ("warning", ', training_job=""', "")),
        "many": (("warning", "", ""),),
        "never": (("warning", "", ""),),
    }[finding.page]
    if finding.page_after:
        variants = tuple(
            (severity, f', severity="{severity}"', "") for severity in ("critical", "warning")
        )
    for severity, jobs, job in variants:
        selector = f'finding="{label}"{jobs}'
        agent = OWN_AGENT
        if rule and rule.expr:
            expression = rule.ticket if severity == "warning" and rule.ticket else rule.expr
            agent = OWN_OR_ANY_AGENT
        elif about_job:
            expression = JOB_ALERT
            found = f"sort_desc({VALUES})".replace("FINDING", f"{selector}, JOB")
            agent = f'{_query(found)}{{{{ first . | label "instance" }}}}{{{{ end }}}}'
        elif "value" in placeholders(finding.says + finding.step):
            expression = VALUES
        else:
            expression = "dshealthd_finding{FINDING}"
        places = _places(finding) if about_job else ""
        named = placeholders("" if rule and rule.description else finding.says)
        others = ITS_NODES if places and "node" in named else ""
        description = f"{case}{says}{others} {job}{FIRST_STEP}{_step(finding, case)}"
        if places:
            description = _of_places(places.replace("FINDING", f"{selector}, JOB"), description)
        yield {
            "alert": finding.name,
            "expr": expression.replace("FINDING", selector),
            **({"for": rule.hold} if rule and rule.hold else {}),
            "keep_firing_for": (rule and rule.keep) or KEEP_FIRING,
            "labels": {
                **RULESET,
                "severity": severity,
                "component": finding.component,
                "symptom": symptom.slug,
                **({"audience": finding.audience} if finding.audience != "operator" else {}),
                **({MANY: "page"} if finding.page == MANY else {}),
            },
            "annotations": {
                "summary": finding.summary,
                "description": description,
                "runbook_url": _link(runbooks, agent, symptom.slug, finding),
            },
        }


def _places(finding: FindingType) -> str:
    """Return the query for the places that a job's alert is about, the worst first; empty if its
    sentences name none, or the alert has their labels.
    """
    if finding.rule and (finding.rule.places or finding.rule.expr):
        return finding.rule.places
    named = placeholders("".join((finding.says, finding.step, *finding.steps.values())))
    return f"sort_desc({VALUES})" if named - {"training_job"} else ""


def _of_places(query: str, description: str) -> str:
    """Return the description with the labels and the value of the first place that a query finds.

    What a place says may change, which labels of an alert must not.
    """
    return (
        f"{_query(query)}{{{{ $places := . }}}}{{{{ with first . }}}}"
        "{{ $labels := .Labels }}{{ $value := .Value }}"
        f"{description}{{{{ end }}}}{{{{ end }}}}"
    )


def _query(expression: str) -> str:
    """Return the beginning of a template that has the results for the job of its alert, if any."""
    of = "$labels.cluster $labels.training_job"
    if "NODE" in expression:
        of += ' (or $labels.node ".*")'
    text = " ".join(expression.split()).replace("JOB", OF_JOB).replace("NODE", OF_NODE)
    return f"{{{{ with printf `{text}` {of} | query }}}}"


def _step(entry: FindingType | Alert, known: str = "") -> str:
    """Return the template of a first step, by the case that is `known` or that the labels tell."""
    cases = "".join(
        f'{{{{ {"else " if place else ""}if match "^{case}" $case }}}}{template(step)}'
        for place, (case, step) in enumerate(entry.steps.items())
    )
    if not cases:
        return template(entry.step)
    case = "" if known else "{{ $case := or $labels.reason $labels.class }}"
    return f"{case}{cases}{{{{ else }}}}{template(entry.step)}{{{{ end }}}}"


def _alert_rules(
    symptom: Symptom, alert: Alert, thresholds: int, runbooks: str
) -> Iterator[dict[str, Any]]:
    """Yield an alert's rule, and that of its milder cases, with the same words."""
    step = f" {FIRST_STEP}{_step(alert)}" if alert.step else ""
    cases = [(alert.expr, alert.hold, alert.severity)]
    if alert.ticket:
        cases.append((alert.ticket, alert.ticket_hold, "warning"))
    for expression, hold, severity in cases:
        kept = severity not in AT_ONCE
        yield {
            "alert": alert.name,
            "expr": expression.replace("THRESHOLDS", str(thresholds)),
            **({"for": hold} if hold else {}),
            **({"keep_firing_for": alert.keep or KEEP_FIRING} if kept else {}),
            "labels": {
                **RULESET,
                "severity": severity,
                "component": alert.component,
                "symptom": alert.symptom or symptom.slug,
                **({"audience": alert.audience} if alert.audience != "operator" else {}),
            },
            "annotations": {
                "summary": alert.summary,
                "description": alert.description + step,
                "runbook_url": _link(
                    runbooks,
                    ANY_AGENT if symptom.slug == GONE else OWN_OR_ANY_AGENT,
                    symptom.slug,
                    alert,
                ),
            },
        }


def _link(runbooks: str, agent: str, slug: str, alert: Alert | FindingType) -> str:
    """Return the URL of the heading of an alert in its runbook."""
    return f"{url(runbooks, slug).replace(AGENT, agent)}#{anchor(alert)}"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the alert rules in a directory.

    Return status 1 if the file is out of date or a symptom is wrong.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument(
        "--runbooks",
        metavar="URL",
        default=SERVED,
        help="URL of the runbooks, with SLUG for the symptom and AGENT for an agent's address; "
        "default %(default)s",
    )
    options = parser.parse_args(arguments)
    try:
        shipped = (options.directory / THRESHOLDS).read_text(encoding="utf-8")
        number = shipped.count(" record: dshealthd:threshold:")
        text = rules(all_symptoms().values(), number, options.runbooks)
    except (EntryError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return files.write({options.directory / FILE: text}, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
