"""The files of `tests/symptoms/*.yml` as promtool reads them, and what they expect of each
alert.

They are promtool's own, but for what need not be said: they are about the shipped rules, and their
samples 5 s apart, unless they say otherwise; what has the label `node` alone is of that node's
agent; rows may stand for several series, as in the scenes of findings, and an expectation holds at
each of several times.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests import yaml_files
from tests.findings.player import EVERY, each_series, seconds
from tests.symptoms.expression import selectors

ROOT = Path(__file__).parent.parent.parent
RULES = [
    ROOT / "deploy/prometheus" / name for name in ("thresholds.yml", "recording.yml", "alerts.yml")
]
FILES = sorted(Path(__file__).parent.glob("*.yml"))
_RECORD = re.compile(r"dshealthd(?::\w+)+")
_ALERT = re.compile(r'alertname="(\w+)"')
_ALERTS = re.compile(r'alertname=~"([\w|]+)"')
_NAME = re.compile(r"\bdshealthd(?::\w+)+|\bDshealthd\w+")
_NODE = re.compile(r'\bnode="([^"]*)"')
_JOB = re.compile(r"\bjob=")
_NAMES = re.compile(r'__name__=~"([^"]*)"')


class Expectation(NamedTuple):
    """That an alert fires at a time, or does not."""

    alert: str
    seconds: float
    fires: bool


def run(*arguments: str | Path, limit: float = 280) -> tuple[int, str]:
    """Run promtool for `limit` seconds at most; return its exit status and what it prints."""
    done = subprocess.run(
        ["promtool", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
        # Or a fifth of its time is the collection of garbage, and another one that of its threads.
        env={**os.environ, "GOGC": "400", "GOMAXPROCS": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def promtool(*arguments: str | Path) -> str:
    """Run promtool and return what it prints; AssertionError with that if it fails."""
    status, text = run(*arguments)
    assert status == 0, text[-40_000:]
    return text


def asking(
    expression: str,
    at: str,
    series: Iterable[Mapping[str, str]],
    expected: Mapping[str, float] = MappingProxyType({}),
    interval: str = "1m",
) -> dict[str, Any]:
    """Return a scene with rows of series, in which an expression is asked for once: its values are
    expected by their labels.
    """
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    return {
        "interval": interval,
        "input_series": list(series),
        "promql_expr_test": [{"expr": expression, "eval_time": at, "exp_samples": samples}],
    }


def got(file: Path, limit: float = 280) -> str:
    """Return what the one expression of a file gives, of which it expects nothing; empty if so."""
    status, text = run("test", "rules", file, limit=limit)
    found = re.search(r"got: *(.*)$", text, re.MULTILINE)
    assert status == 0 or found, text[-40_000:]
    return found[1] if found else ""


@functools.cache
def rule_groups() -> list[tuple[str, dict[str, Any]]]:
    """Return every rule with the name of its file."""
    return [
        (file.name, rule)
        for file in RULES
        for group in yaml_files.load(file)["groups"]
        for rule in group["rules"]
    ]


def load(file: Path) -> dict[str, Any]:
    """Return a file of scenes with its rules and all series and labels, for promtool."""
    document: dict[str, Any] = {"rule_files": [*map(str, RULES)], **yaml_files.load(file)}
    for test in document["tests"]:
        test.setdefault("interval", EVERY)
        test["promql_expr_test"] = [
            entry | {"eval_time": at}
            for entry in test.get("promql_expr_test", ())
            for at in str(entry["eval_time"]).split()
        ]
        test["input_series"] = [
            {"series": _of_target(series), "values": row["values"]}
            for row in test["input_series"]
            for series in each_series(row["series"])
        ]
    return document


def _of_target(series: str) -> str:
    """Return a series with the labels that a scrape of its node adds."""
    node = _NODE.search(series)
    if node is None or _JOB.search(series) or not series.startswith(("dshealthd", "up{")):
        return series
    return f'{series[:-1]}, job="dshealthd", instance="{node[1]}:1"}}'


def whole(scene: dict[str, Any]) -> dict[str, Any]:
    """Return a file with one scene for promtool, played at each minute with all rules as shipped.

    Groups are evaluated in their order in the files, as in `pruned`.
    """
    files = [yaml_files.load(file) for file in RULES]
    return {
        "rule_files": list(map(str, RULES)),
        "evaluation_interval": "1m",
        "group_eval_order": [group["name"] for content in files for group in content["groups"]],
        "tests": [scene],
    }


def pruned(file: Path, directory: Path) -> Path:
    """Return a copy of a file of scenes with only those rules that the alerts it names need.

    The alerts that a scene does not name take nine tenths of the time. A file that asks for any
    alert keeps all rules. Rules are as shipped but for `keep_firing_for`: scenes show when the
    expression ceases to hold. Files called `keep-*` have that too.

    Groups are evaluated in their order in the files, what is recorded before the alerts: promtool
    would take another one at random in each run, and alerts then come a round later in some.

    Nodes judge their series only where a rule reads what they find, and the scene does not say it.
    """
    kept = file.name.startswith("keep-")
    document = load(file)
    text = json.dumps(document)
    wanted = set(_NAME.findall(text))
    whole = "ALERTS{alertname!=" in text
    # An alert that is a page or a ticket is two rules of one name.
    rules: dict[str, str] = {}
    quoted: dict[str, set[str]] = {}
    for _, rule in rule_groups():
        name = rule.get("record") or rule["alert"]
        rules[name] = f"{rules[name]}\nor\n{rule['expr']}" if name in rules else rule["expr"]
        quoted[name] = set(_RECORD.findall(" ".join(rule.get("annotations", {}).values())))
    waiting = list(rules if whole else wanted & rules.keys())
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        needed.add(name)
        expression = rules[name]
        read = {found.metric for found in selectors(expression)} | set(_ALERT.findall(expression))
        read |= {name for names in _ALERTS.findall(expression) for name in names.split("|")}
        read |= quoted[name]
        patterns = _NAMES.findall(expression)
        read |= {other for other in rules if any(re.fullmatch(each, other) for each in patterns)}
        waiting += (read & rules.keys()) - needed
    names, order = [], []
    for source in document["rule_files"]:
        content = yaml_files.load(file.parent / source)
        for group in content["groups"]:
            order.append(group["name"])
            group["rules"] = [
                {key: value for key, value in rule.items() if kept or key != "keep_firing_for"}
                for rule in group["rules"]
                if (rule.get("record") or rule["alert"]) in needed
            ]
        names.append(directory / Path(source).name)
        names[-1].write_text(json.dumps(content), encoding="utf-8")
    # It reads these files, too.
    from tests.findings.promtool_scenes import JUDGED, finding_series

    asked = (
        test.get(key, ())
        for test in document["tests"]
        for key in ("alert_rule_test", "promql_expr_test")
    )
    texts = [*map(json.dumps, asked), *(name.read_text(encoding="utf-8") for name in names)]
    read = {metric for metric in JUDGED if any(metric in text for text in texts)}
    for test in document["tests"]:
        if read - {row["series"].partition("{")[0] for row in test["input_series"]}:
            test["input_series"] += finding_series(test)
    copy = directory / file.name
    copy.write_text(
        json.dumps(
            document | {"rule_files": [str(name) for name in names], "group_eval_order": order}
        ),
        encoding="utf-8",
    )
    return copy


def _sample(value: float, labels: dict[str, str]) -> str:
    """Return an expression whose result has this value and these labels."""
    expression = f"vector({value!r})"
    for name, text in labels.items():
        expression = f'label_replace({expression}, "{name}", "{text}", "", "")'
    return expression


def rendered(cases: list[tuple[str, float, dict[str, str]]]) -> list[str]:
    """Return what Prometheus' templates make of values and labels: each is that of an alert."""
    rules = [
        {"alert": f"A{place}", "expr": _sample(value, labels), "annotations": {"text": template}}
        for place, (template, value, labels) in enumerate(cases)
    ]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "rules.yml").write_text(
            json.dumps({"groups": [{"name": "g", "rules": rules}]}), encoding="utf-8"
        )
        test = {
            "interval": "1m",
            "alert_rule_test": [
                {
                    "eval_time": "0s",
                    "alertname": rule["alert"],
                    "exp_alerts": [{"exp_annotations": {"text": "-"}}],
                }
                for rule in rules
            ],
        }
        file = Path(directory) / "test.yml"
        file.write_text(
            json.dumps({"rule_files": ["rules.yml"], "tests": [test]}), encoding="utf-8"
        )
        _, text = run("test", "rules", file)
    # Each test fails, and shows what it got.
    got = dict(
        re.findall(
            r'alertname: A(\d+),.*?got:\[.*?Annotations:{text="((?:[^"\\]|\\.)*)"}',
            text,
            re.DOTALL,
        )
    )
    return [got[str(place)] for place in range(len(cases))]


def scenes() -> Iterator[list[Expectation]]:
    """Yield what each scene, an element of `tests`, expects."""
    for file in FILES:
        for scene in load(file)["tests"]:
            yield list(_expectations(scene))


def _expectations(scene: dict[str, Any]) -> Iterator[Expectation]:
    for entry in scene.get("alert_rule_test", ()):
        yield Expectation(
            entry["alertname"], seconds(entry["eval_time"]), bool(entry.get("exp_alerts"))
        )
    for entry in scene.get("promql_expr_test", ()):
        if 'alertstate="firing"' in entry["expr"] and (match := _ALERT.search(entry["expr"])):
            yield Expectation(match[1], seconds(entry["eval_time"]), bool(entry.get("exp_samples")))
