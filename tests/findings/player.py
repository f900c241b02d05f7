"""Plays scenes through the judge: samples in, findings over time out.

A scene is what the agents of some nodes read, in promtool's notation, and what is found when:

    - name: a job's process comes to its limit
      samples:
        - dshealthd_open_files{scope="job", training_job="run-1"} 200x4 900x12 1020x52
        - dshealthd_open_files_limit{scope="job", training_job="run-1"} 1024x68
      found: {20s: [], 1m15s: [HostLimitNear job run-1]}

A scene of hours is judged as seldom as its `judged` says, not at each sample. A scene with `limits`
has those of the configuration; one with `clock` has nodes whose clock is that far from the right
one, in seconds: `0x20 3600x20`. Samples without a label `node` are those of the only one; where
there are several, what is found begins with the node: `a: GpuLost GPU 3`. A label with several
values, `rank="0"|"1"`, is a series for each of them; values joined by `+` go with those of another
label: `gpu="0"+"1", uuid="A"+"B"`. All findings of a moment are listed; a critical one ends with
the job that it struck: `GpuLost GPU 3, job llama`. Samples are 5 s apart unless `every` says so.
"""

from __future__ import annotations

import functools
import re
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dshealthd.core.collector import Sample
from dshealthd.findings import coverage, idleness, judgement, stalls
from dshealthd.findings.agent import CRASHED
from dshealthd.findings.episodes import Episodes
from dshealthd.findings.finding import Finding, Sign, State
from dshealthd.findings.gpu_history import GpuHistory
from dshealthd.findings.idleness import Idleness
from dshealthd.findings.limits import Limits
from dshealthd.findings.past import Measure, Past
from dshealthd.findings.series import DEFAULTS, Point, Series, short_name
from generate import reference
from tests import yaml_files
from tests.jobs.standstills import standstills

FILES = sorted((Path(__file__).parent / "scenes").glob("*.yml"))
METRICS = {**reference.all_metrics(), CRASHED.name: CRASHED}
LOOKBACK = 300.0
"""Seconds for which a series lasts after its last value, unless it is `stale`."""
STALE, MISSING = "stale", "_"
EVERY = "5s"
ONLY = "n1"
"""Name of a scene's node where it has only one."""
Rule = Callable[[Series, float], Iterator[Sign]]
Row = tuple[str, dict[str, str], list[float | str]]
"""The name, the labels and the values of a series."""
_UNIT = {"h": 3600, "m": 60, "s": 1, "d": 86400}
_SERIES = re.compile(r"([\w:-]+)(?:{(.*)})?")
_ROW = re.compile(r"(\w+(?:{.*})?) (.*)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_VALUE = r'"(?:[^"\\]|\\.)*"'
_SEVERAL = re.compile(rf"(?<==){_VALUE}(?:\|{_VALUE})+")
_TOGETHER = re.compile(rf"(?<==){_VALUE}(?:\+{_VALUE})+")
_RUN = re.compile(
    r"(?P<start>[-+]?(?:Inf|NaN|[\d.]+(?:e[-+]?\d+)?)|_)"
    r"(?P<step>[-+][\d.]+(?:e[-+]?\d+)?)?x(?P<times>\d+)"
)


class Rules:
    """The rules for one node of a scene. They ask for three hundred metrics, and a scene has three:
    one that has found nothing, and asked only for what there never is, is not run again.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are the metrics that the scene has."""
        self.names = {name.removeprefix("dshealthd_") for name in names}
        self.asked: set[str] = set()
        """What the rule that runs has asked for."""
        self.standstill = False
        """Whether a job has stood still: that is asked for in another way."""
        self._idle: dict[Rule, set[str]] = {}
        """What rules that found nothing had asked for."""
        self._watched = {rule: self._watch(rule) for rule in judgement.RULES}

    @property
    def due(self) -> tuple[Rule, ...]:
        """The rules that may find something."""
        return tuple(
            watched
            for rule, watched in self._watched.items()
            if self.standstill or not (asked := self._idle.get(rule)) or asked & self.names
        )

    def _watch(self, rule: Rule) -> Rule:
        @functools.wraps(rule)
        def watched(series: Series, wall: float) -> Iterator[Sign]:
            vars(series).pop("gpus", None)  # so that each rule asks for them
            self.asked = set()
            signs = list(rule(series, wall))
            self._idle[rule] = set() if signs else self.asked
            yield from signs

        return watched


class WatchedSeries(Series):
    """Samples that note what they are asked for."""

    rules: Rules

    def _with(self, name: str, labels: Mapping[str, Any]) -> list[Sample]:
        self.rules.asked.add(name)
        return super()._with(name, labels)

    def _over_time(
        self, kind: Measure, name: str, seconds: float, labels: Mapping[str, Any], **more: Any
    ) -> Iterator[Point]:
        self.rules.asked.add(name)
        return super()._over_time(kind, name, seconds, labels, **more)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples that rules derive."""
        derived = list(samples)
        self.rules.names |= {short_name(sample.metric) for sample in derived}
        super().add(derived)


class Scene:
    """What the agents of some nodes read over time."""

    def __init__(
        self,
        interval: float,
        rows: list[tuple[str, str]],
        clock: str = "0",
        pace: float | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        """`interval` is the time between two samples in seconds, and `pace` between two judgements;
        a row is a series and its values, and `clock` is what the nodes' clocks differ by.
        """
        self.interval, self.limits = interval, limits
        self.pace = pace or interval
        self.clock = list(values(clock))
        self.derived: tuple[Sample, ...] = ()
        """What the last judgement that was played derived for rules that compare nodes."""
        self.series = [(*identity(series), list(values(text))) for series, text in rows]
        self.of_nodes: dict[str, list[Row]] = {}
        """What each node's agent has."""
        for row in self.series:
            self.of_nodes.setdefault(row[1].get("node", ONLY), []).append(row)

    def samples(self, node: str, at: float) -> Iterator[Sample]:
        """Yield what the agent of a node has at a time."""
        for name, labels, history in self.of_nodes[node]:
            metric = METRICS.get(name)
            if metric is None:
                continue
            value = self._value(history, at)
            if value is not None and "le" not in metric.dimensions:
                yield metric(value, *(labels.get(label, "") for label in metric.dimensions))

    def _value(self, history: list[float | str], at: float) -> float | None:
        place = int(at // self.interval)
        for index in range(min(place, len(history) - 1), -1, -1):
            if at - index * self.interval > LOOKBACK or history[index] == STALE:
                return None
            found = history[index]
            if not isinstance(found, str):
                return found
        return None

    def play(self, node: str, until: float) -> Iterator[tuple[float, list[Finding]]]:
        """Yield a node's findings at each moment up to a time, in seconds; none without an
        agent.
        """
        past, episodes, gpus, idle = Past(), Episodes(), GpuHistory(), Idleness()
        rules = Rules(name for name, _, _ in self.of_nodes[node])
        self.derived = ()
        for step in range(int(until // self.pace) + 1):
            at = step * self.pace
            own = list(self.samples(node, at))
            if own:
                wall = at + float(self._value(self.clock, at) or 0)
                series = WatchedSeries(own, self.limits, past, at, standstills(own, wall))
                series.rules = rules
                rules.standstill |= bool(series.standstills)
                gpus.settle(series, wall)
                idle.settle(series, at)
                coverage.settle(series)
                episodes.update(_judged(series, node, wall), at, wall)
                self.derived = tuple(series.samples(stalls.EXPORTED + idleness.EXPORTED))
            yield at, list(episodes.firing) if own else []


def _judged(series: WatchedSeries, node: str, wall: float) -> Iterable[Finding]:
    with unittest.mock.patch.object(judgement, "RULES", series.rules.due):
        seen = judgement.seen(series, node=node, name=node, wall=wall)
    assert seen.failed == {}
    return seen.found.values()


def scene(document: Mapping[str, Any]) -> Scene:
    """Return the scene of a document in the form above."""
    rows = []
    for row in document["samples"]:
        match = _ROW.fullmatch(row)
        assert match is not None, row
        rows += [(series, match[2]) for series in each_series(match[1])]
    pace = seconds(document["judged"]) if "judged" in document else None
    limits = Limits(**document.get("limits", {}))
    return Scene(
        seconds(document.get("every", EVERY)), rows, document.get("clock", "0"), pace, limits
    )


def found(played: Scene, times: list[float]) -> dict[float, list[str]]:
    """Return what all nodes of a scene find at some times, in seconds, as its document lists it."""
    nodes = sorted(played.of_nodes)
    lists: dict[float, list[str]] = {at: [] for at in times}
    for node in nodes:
        prefix = f"{node}: " if len(nodes) > 1 else ""
        for at, findings in played.play(node, max(times)):
            for time in times:
                if at <= time < at + played.pace:
                    lists[time] = [
                        *lists[time],
                        *(prefix + _written(finding) for finding in findings),
                    ]
    return lists


def _written(finding: Finding) -> str:
    """Write a finding as `NAME PART`, and the job that makes it a page: `NAME PART, job JOB`."""
    job = finding.training_job if finding.severity is State.CRITICAL else ""
    text = f"{finding.name} {finding.part}".strip()
    return f"{text}, job {job}" if job and job != finding.part else text


@functools.cache
def documents(file: Path) -> list[dict[str, Any]]:
    """Return the scenes of a file."""
    return list(yaml_files.load(file))


def seconds(text: str) -> float:
    """Return a duration of Prometheus in seconds."""
    return float(
        sum(float(number) * _UNIT[unit] for number, unit in re.findall(r"([\d.]+)([dhms])", text))
    )


def identity(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the labels of a series."""
    match = _SERIES.fullmatch(text.strip())
    assert match is not None, text
    return match[1], {
        key: value.replace('\\"', '"').replace("\\\\", "\\")
        for key, value in _LABEL.findall(match[2] or "")
    }


def each_series(row: str) -> Iterator[str]:
    """Yield the series of a row, one for each value of a label that has several."""
    match = _SEVERAL.search(row)
    if match is None:
        alike = [re.findall(_VALUE, values) for values in _TOGETHER.findall(row)]
        for values in zip(*alike, strict=True) if alike else [()]:
            each = iter(values)
            yield _TOGETHER.sub(lambda _, each=each: next(each), row)  # type: ignore[misc]
        return
    for value in re.findall(_VALUE, match[0]):
        yield from each_series(row[: match.start()] + value + row[match.end() :])


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
