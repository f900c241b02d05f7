"""The scenes of `tests/symptoms` as one node sees them: the samples of its agent at a moment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from dshealthd.findings.series import Series
from dshealthd.findings.service import LEFT_OUT, exported
from tests.findings.player import METRICS, Scene, seconds
from tests.symptoms.promtool import FILES, rule_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Sample

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ALERT = re.compile(r'alertname="(\w+)"')
Labels = tuple[dict[str, str], ...]
OF_TARGETS = ("job", "instance", "node", "cluster", "leaf")


class Moment(NamedTuple):
    """A time at which a scene says whether an alert fires."""

    scene: PromtoolScene
    alert: str
    at: float
    """Seconds from the scene's start, at the last evaluation of the rule before it was asked."""
    fires: Labels
    """The labels of those that fire."""
    texts: Labels
    """Their annotations."""


class PromtoolScene(Scene):
    """The series of one test of promtool."""

    def __init__(self, name: str, document: dict[str, Any]) -> None:
        """Read a scene of a file of that name."""
        super().__init__(
            seconds(str(document["interval"])),
            [(row["series"], str(row["values"])) for row in document["input_series"]],
        )
        self.name = f"{name}: {document.get('name', '')}"

    def samples(self, node: str, at: float) -> Iterator[Sample]:
        """Yield what the agent of a node has at a time.

        What other agents say of suspects is among it, as if this one had found it too.
        """
        yield from super().samples(node, at)
        for other in self.nodes():
            if other != node:
                yield from (
                    sample
                    for sample in super().samples(other, at)
                    if sample.metric.name == "dshealthd_suspect"
                )

    def look(self, node: str, at: float) -> Series:
        """Return the samples of a node at a time, as rules read them."""
        return Series(self.samples(node, at))


def moments() -> Iterator[Moment]:
    """Yield all moments of all scenes."""
    paces = _paces()
    for file in FILES:
        document = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        pace = seconds(str(document.get("evaluation_interval", "1m")))
        for test in document["tests"]:
            scene = PromtoolScene(file.name, test)
            for alert, at, fires, texts in _expected(test):
                step = paces.get(alert) or pace
                yield Moment(scene, alert, seconds(at) // step * step, fires, texts)


def scenes(name: str) -> Iterator[PromtoolScene]:
    """Yield the scenes of one file."""
    file = next(file for file in FILES if file.name == name)
    document = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    yield from (PromtoolScene(file.name, test) for test in document["tests"])


def _expected(test: dict[str, Any]) -> Iterator[tuple[str, str, Labels, Labels]]:
    """Yield what a test expects of alerts and when, by name or by a query for ALERTS."""
    for entry in test.get("alert_rule_test", ()):
        alerts = entry.get("exp_alerts") or ()
        fires = tuple(alert.get("exp_labels", {}) for alert in alerts)
        texts = tuple(alert.get("exp_annotations", {}) for alert in alerts)
        yield entry["alertname"], str(entry["eval_time"]), fires, texts
    for entry in test.get("promql_expr_test", ()):
        match = _ALERT.search(entry["expr"])
        if match is not None and 'alertstate="firing"' in entry["expr"]:
            samples = entry.get("exp_samples") or ()
            fires = tuple(dict(_LABEL.findall(sample.get("labels", ""))) for sample in samples)
            yield match[1], str(entry["eval_time"]), fires, tuple({} for _ in samples)


def _paces() -> dict[str, float]:
    """Return how often the rules are evaluated that have a pace of their own."""
    from dshealthd.symptoms import all_symptoms

    return {
        alert.name: seconds(alert.every)
        for symptom in all_symptoms().values()
        for alert in symptom.alerts
        if alert.every
    }


def thresholds() -> dict[str, float]:
    """Return what Prometheus compares with, by name."""
    return {
        rule["record"]: float(rule["expr"].removeprefix("vector(").removesuffix(")"))
        for file, rule in rule_groups()
        if file == "thresholds.yml"
    }


def finding_series(document: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the series that the judges of a promtool test's nodes export, in its notation.

    How many are left out is as the test says, if it does.
    """
    scene = PromtoolScene("", document)
    told = any(name == LEFT_OUT.name for name, _, _ in scene.series)
    entries = (*document.get("alert_rule_test", ()), *document.get("promql_expr_test", ()))
    until = max(seconds(str(entry["eval_time"])) for entry in entries)
    targets = {
        labels["node"]: {key: labels[key] for key in OF_TARGETS if key in labels}
        for _, labels, _ in scene.series
        if labels.get("node")
    }
    for node, target in targets.items():
        history: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for step, (_, findings) in enumerate(scene.play(node, until)):
            for sample in exported(findings):
                if told and sample.metric is LEFT_OUT:
                    continue
                row = history.setdefault((sample.metric.name, sample.labels), ["_"] * step)
                row.append(f"{sample.value!r}")
            for row in history.values():
                if len(row) == step:
                    row.append("stale")
        for (name, values), row in history.items():
            labels = dict(zip(METRICS[name].dimensions, values, strict=True)) | target
            text = ", ".join(f'{key}="{_escaped(value)}"' for key, value in labels.items() if value)
            yield {"series": f"{name}{{{text}}}", "values": " ".join(row)}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
