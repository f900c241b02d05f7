"""The last hour of this node's main figures, drawn on its page and said in words beside findings.

It keeps what collectors have read anyway, in memory alone: a restart of the agent begins it anew.
Times are monotonic, so that a clock that is set moves nothing.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.config import registry
from dshealthd.core import documents
from dshealthd.core.documents import COMPACT
from dshealthd.core.text import duration
from dshealthd.findings.catalogue import part_name
from dshealthd.findings.figures import CAUSES, FIGURES, Figure

if TYPE_CHECKING:
    from dshealthd.core.collector import Metric
    from dshealthd.core.snapshot import Latest, Snapshot
    from dshealthd.findings.entry import Entry
    from dshealthd.findings.finding import Finding

SCHEMA = 1
"""Version of `/api/v1/trends`; see docs/history.md."""
STEP = 30.0
"""Seconds of a point, in which collectors that run every 15 s have two readings."""
POINTS = 120
"""Points of a line: an hour."""
MAX_LINES = 512
"""Most lines. Each has 120 points of two floats, 960 bytes, and some 600 bytes of Python's own: 512
take 0.8 MiB of the 1 MiB that the whole may take. 16 GPUs with 5 figures, 32 ports with 3 and 16
jobs have 192."""
RECENT = 20
"""Points by which a trend is judged: ten minutes, as long as a GPU takes to become warm."""
SCATTER = 3.0
"""How many times its scatter a line must rise or fall to do so: of 20 points without a trend, the
fitted rise has 0.77 times their scatter (the root of 12/20) as its own, so that this is 3.9 times
that, which chance exceeds once in a thousand."""
LARGEST = 1e30
"""No figure of a node comes near this, and a line's floats hold no more than 3e38."""
RESOLUTION = 0.01
"""Least scatter, as a share of the largest value: drivers give degrees and percent as integers."""


@dataclass(slots=True, eq=False)
class FigureHistory:
    """One figure of one part over the hour: its lowest and highest value in each step."""

    metric: str
    figure: Figure
    what: str
    part: str = ""
    """As findings name it. An index that moved to another GPU is what it was last."""
    last: int = 0
    """The step of its last value."""
    total: tuple[float, float] | None = None
    """Of a counter, the time and total of its last reading."""
    low: array[float] = field(default_factory=lambda: array("f", [math.nan]) * POINTS)
    high: array[float] = field(default_factory=lambda: array("f", [math.nan]) * POINTS)

    def put(self, step: int, value: float) -> None:
        """Record a figure's value, in the unit of the page."""
        at, self.last = step % POINTS, step
        self.low[at] = value if math.isnan(self.low[at]) else min(self.low[at], value)
        self.high[at] = value if math.isnan(self.high[at]) else max(self.high[at], value)

    def count(self, step: int, at: float, total: float) -> None:
        """Record a reading of a counter, of monotonic time `at`."""
        if self.total is not None and total >= self.total[1]:
            self.put(step, self.figure.factor * (total - self.total[1]) / (at - self.total[0]))
        self.total = at, total

    def away(self, value: float) -> float:
        """Return how far a value, in the metric's own unit, is from the last ones."""
        value *= self.figure.factor
        at = self.last % POINTS
        return max(self.low[at] - value, value - self.high[at], 0.0)

    def points(self, step: int) -> list[tuple[float, float]]:
        """Return lowest and highest value of each step until this one, NaN where it is unknown."""
        cut = (step + 1) % POINTS
        pairs = list(zip(self.low, self.high, strict=True))
        return pairs[cut:] + pairs[:cut]


def slope(values: Sequence[float]) -> float | None:
    """Return by how much values rise from one to the next, below 0 if they fall, 0 if they are
    steady; None if that is not known.

    They do not if the line that fits them best does not rise by more than their scatter about it
    explains. NaN is unknown: half of them must be known, and one of the last two.
    """
    known = [(at, value) for at, value in enumerate(values) if not math.isnan(value)]
    if 2 * len(known) < len(values) or not known or known[-1][0] < len(values) - 2:
        return None
    middle = sum(at for at, _ in known) / len(known)
    mean = sum(value for _, value in known) / len(known)
    rise = sum((at - middle) * (value - mean) for at, value in known)
    rise /= sum((at - middle) ** 2 for at, _ in known)
    rest = sum((value - mean - rise * (at - middle)) ** 2 for at, value in known)
    scatter = math.sqrt(rest / (len(known) - 2))
    least = RESOLUTION * max(abs(value) for _, value in known)
    change = abs(rise) * (known[-1][0] - known[0][0])
    return rise if change > SCATTER * max(scatter, least) else 0.0


def trend(points: Sequence[tuple[float, float]], unit: str) -> str:
    """Return whether a line rises, falls or is steady: `rising 3 K/min`; empty if unknown."""
    by = slope([(low + high) / 2 for low, high in points[-RECENT:]])
    if by is None:
        return ""
    word = "rising" if by > 0 else "falling"
    return f"{word} {_number(abs(by) * 60.0 / STEP, 2)} {unit}" if by else "steady"


def trend_in_words(points: Sequence[tuple[float, float]], figure: Figure) -> str:
    """Return a line in words: `54 to 71 °C in the last hour, now 70, rising 3 K/min`."""
    known = [at for at, (low, _) in enumerate(points) if not math.isnan(low)]
    if not known:
        return "unknown"
    bounds = [min(points[at][0] for at in known), max(points[at][1] for at in known)]
    ends = list(dict.fromkeys(map(_number, bounds)))
    since, silent = len(points) - known[0], len(points) - 1 - known[-1]
    lasts = "hour" if since == POINTS else duration(since * STEP)
    parts = [f"{' to '.join(ends)} {figure.unit} in the last {lasts}"]
    if (gaps := since - len(known) - silent) > 0:
        parts.append(f"{duration(gaps * STEP)} of it unknown")
    if silent > 1:
        return ", ".join([*parts, f"unknown for {duration(silent * STEP)}"])
    if len(ends) > 1:
        parts += [f"now {_number(points[known[-1]][1])}", trend(points, figure.slope)]
    return ", ".join(filter(None, parts))


def _number(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if abs(value) >= 10.0**digits else f"{value:.{digits}g}"


@functools.cache
def _collectors() -> tuple[str, ...]:
    known = registry.collectors_by_metric()
    return tuple(sorted({known[metric] for metric in FIGURES}))


class Trends:
    """The lines of this node."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._lines: dict[tuple[str, str], FigureHistory] = {}
        """By the identity of their part, and what they are."""
        self._found: dict[tuple[str, tuple[str, ...]], tuple[FigureHistory, str]] = {}
        """By metric and labels, of this step: to make the name of its part each time takes four
        times as long."""
        self._step = 0
        self._read: dict[str, float] = {}
        """Monotonic time of each collector's result that was read last."""
        self._left_out: set[tuple[str, str]] = set()
        self._lines_text = ""

    def settle(self, snapshot: Snapshot, now: float) -> None:
        """Record the results that are new, at monotonic time `now`."""
        self._turn(int(now // STEP))
        for name in _collectors():
            latest = snapshot.get(name)
            at = None if latest is None else latest.sampled
            if latest is None or at is None or at == self._read.get(name):
                continue
            self._read[name] = at
            if at > now - STEP * (POINTS - 1):
                self._add(latest, at)

    def _turn(self, step: int) -> None:
        """Empty the steps that have begun, and forget what was not read for an hour."""
        for at in range(max(self._step + 1, step + 1 - POINTS), step + 1):
            for line in self._lines.values():
                line.low[at % POINTS] = line.high[at % POINTS] = math.nan
        if step > self._step:
            self._step, self._lines_text = step, ""
            gone = [key for key, line in self._lines.items() if line.last <= step - POINTS]
            for key in gone:
                del self._lines[key]
            self._found.clear()
            if gone:
                self._left_out.clear()

    def _add(self, latest: Latest, at: float) -> None:
        step = int(at // STEP)
        self._lines_text = ""
        totals: dict[FigureHistory, float] = {}
        for metric, labels, value in latest.result.samples:
            figure = FIGURES.get(metric.name)
            if figure is None or not abs(value) < LARGEST:  # NaN is not either
                continue
            found = self._found.get((metric.name, labels)) or self._begin(metric, labels, step)
            if found is None:
                continue
            line, part = found
            line.part = part
            if figure.is_counter:
                totals[line] = totals.get(line, 0.0) + value
            else:
                line.put(step, figure.factor * value)
        for line, total in totals.items():
            line.count(step, at, total)

    def _begin(
        self, metric: Metric, labels: tuple[str, ...], step: int
    ) -> tuple[FigureHistory, str] | None:
        """Begin the line of a series; None if there is no room for one more."""
        named = dict(zip(metric.dimensions, labels, strict=True))
        figure, part = FIGURES[metric.name], part_name(named, "")
        key = named.get("uuid") or part, figure.what.format(**named)
        if key not in self._lines:
            if len(self._lines) >= MAX_LINES:
                self._left_out.add(key)
                return None
            self._lines[key] = FigureHistory(metric.name, figure, key[1], last=step)
        found = self._found[metric.name, labels] = self._lines[key], part
        return found

    def _shown(self) -> Iterator[FigureHistory]:
        """Yield the lines, of those of one name the one that was read last."""
        shown: dict[tuple[str, str], FigureHistory] = {}
        for line in self._lines.values():
            name = line.part, line.what
            if name not in shown or shown[name].last <= line.last:
                shown[name] = line
        yield from shown.values()

    def of(self, finding: Finding) -> str:
        """Return the trend of what a finding is about: `core temperature rising 3 K/min`; empty if
        that is unknown.
        """
        metric = CAUSES.get(finding.source, finding.source)
        if metric not in FIGURES:
            return ""
        lines = [
            line for line in self._shown() if (line.metric, line.part) == (metric, finding.part)
        ]
        if not lines:
            return ""
        value = finding.value if metric == finding.source else None
        # Of a GPU's sensors, the one that the finding is about.
        line = lines[0] if value is None else min(lines, key=lambda one: one.away(value))
        says = trend(line.points(self._step), line.figure.slope)
        return f"{line.what} {says}" if says else ""

    def document(self, node: str, wall: float, begun: Iterable[Entry]) -> bytes:
        """Return the lines as JSON for `/api/v1/trends`, with the findings that have `begun`."""
        if not self._lines_text:
            rows = [self._row(line) for line in self._shown()]
            self._lines_text = documents.dumps(rows, separators=COMPACT)
        head = {
            "schema": SCHEMA,
            "node": node,
            "time": round(wall, 3),
            "step_seconds": STEP,
            "left_out": len(self._left_out),
            "marks": [
                {"part": one.part, "begin": one.begin, "severity": one.severity, "says": one.says}
                for one in begun
                if one.severity is not None and 0.0 <= wall - one.begin <= STEP * POINTS
            ],
        }
        start = documents.dumps(head, separators=COMPACT)[:-1]
        return f'{start},"lines":{self._lines_text}}}'.encode()

    def _row(self, line: FigureHistory) -> Mapping[str, Any]:
        points = line.points(self._step)
        return {
            "part": line.part,
            "what": line.what,
            "says": trend_in_words(points, line.figure),
            "points": [None if math.isnan(low) else _pair(low, high) for low, high in points],
        }


def _pair(low: float, high: float) -> float | list[float]:
    """Return a point for JSON, to four digits: one number if all readings were equal."""
    low, high = float(f"{low:.4g}"), float(f"{high:.4g}")
    return low if low == high else [low, high]
