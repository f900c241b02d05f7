"""The scenes of `tests/symptoms` as one node sees them: the samples of its agent at a moment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from dshealthd import reference
from dshealthd.findings.series import Series
from tests.symptoms.promtool import FILES, rule_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Sample

LOOKBACK = 300.0
"""Seconds for which Prometheus goes on with the last sample of a series."""
METRICS = reference.all_metrics()
_UNIT = {"h": 3600, "m": 60, "s": 1, "d": 86400}
_SERIES = re.compile(r"([\w:]+)(?:{(.*)})?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RUN = re.compile(
    r"(?P<start>[-+]?(?:Inf|NaN|[\d.]+(?:e[-+]?\d+)?)|_)"
    r"(?P<step>[-+][\d.]+(?:e[-+]?\d+)?)?x(?P<times>\d+)"
)
_ALERT = re.compile(r'alertname="(\w+)"')
Labels = tuple[dict[str, str], ...]
STALE, MISSING = "stale", "_"


class Moment(NamedTuple):
    """A time at which a scene says whether an alert fires."""

    scene: Scene
    alert: str
    at: float
    """Seconds from the scene's start, at the last evaluation of the rule before it was asked."""
    fires: Labels
    """The labels of those that fire."""
    texts: Labels
    """Their annotations."""


class Scene:
    """The series of one test of promtool."""

    def __init__(self, name: str, document: dict[str, Any]) -> None:
        """Read a scene of a file of that name."""
        self.name = f"{name}: {document.get('name', '')}"
        self.interval = seconds(str(document["interval"]))
        self.series = [
            (*_identity(row["series"]), list(values(str(row["values"]))))
            for row in document["input_series"]
        ]

    def nodes(self) -> set[str]:
        """Return the nodes that have samples."""
        return {labels["node"] for _, labels, _ in self.series if labels.get("node")}

    def samples(self, node: str, at: float) -> Iterator[Sample]:
        """Yield what the agent of a node has at a time.

        What other agents say of suspects is among it, as if this one had found it too.
        """
        for name, labels, history in self.series:
            metric = METRICS.get(name)
            mine = labels.get("node") == node or name == "dshealthd_suspect"
            if metric is None or not mine:
                continue
            value = self._value(history, at)
            own = {**labels, "job": labels.get("exported_job", "")}
            if value is not None and "le" not in metric.dimensions:
                yield metric(value, *(own.get(label, "") for label in metric.dimensions))

    def _value(self, history: list[float | str], at: float) -> float | None:
        place = int(at // self.interval)
        for index in range(min(place, len(history) - 1), -1, -1):
            if at - index * self.interval > LOOKBACK or history[index] == STALE:
                return None
            found = history[index]
            if not isinstance(found, str):
                return found
        return None

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
            scene = Scene(file.name, test)
            for alert, at, fires, texts in _expected(test):
                step = paces.get(alert) or pace
                yield Moment(scene, alert, seconds(at) // step * step, fires, texts)


def scenes(name: str) -> Iterator[Scene]:
    """Yield the scenes of one file."""
    file = next(file for file in FILES if file.name == name)
    document = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    yield from (Scene(file.name, test) for test in document["tests"])


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


def seconds(text: str) -> float:
    """Return a duration of Prometheus in seconds."""
    return float(sum(float(n) * _UNIT[unit] for n, unit in re.findall(r"([\d.]+)([dhms])", text)))


def _identity(text: str) -> tuple[str, dict[str, str]]:
    match = _SERIES.fullmatch(text.strip())
    assert match is not None, text
    return match[1], {
        key: value.replace('\\"', '"').replace("\\\\", "\\")
        for key, value in _LABEL.findall(match[2] or "")
    }


def values(text: str) -> Iterator[float | str]:
    """Yield the values of promtool's notation: `1x6` is seven ones, `_x6` six gaps."""
    for word in text.split():
        run = _RUN.fullmatch(word)
        if word in (STALE, MISSING):
            yield word
        elif run is None:
            yield float(word)
        elif run["start"] == MISSING:
            yield from [MISSING] * int(run["times"])
        else:
            start, step = float(run["start"]), float(run["step"] or 0)
            yield from (start + step * number for number in range(int(run["times"]) + 1))
