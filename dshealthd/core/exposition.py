"""The exposition: samples as Prometheus text and OpenMetrics text.

Byte for byte what `prometheus_client` writes for the same families (a test proves it), at about a
tenth of its cost: lines are cached from scrape to scrape, as the series, and most of their values,
hardly change.
"""

from __future__ import annotations

import enum
import functools
import math
from typing import TYPE_CHECKING

from dshealthd.core.collector import Metric, MetricKind, series_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.core.collector import Sample

MAX_LABEL_LENGTH = 128
EXPONENT_FROM = 6
"""Numbers with more digits before the point get an exponent."""
PLAIN_BELOW = 10.0**EXPONENT_FROM
_CONTROLS = dict.fromkeys((*range(32), 127))


class Format(enum.Enum):
    """The two text formats, with their content types."""

    PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

    @property
    def end(self) -> str:
        """The text after the last family of an exposition."""
        return "# EOF\n" if self is Format.OPENMETRICS else ""


def negotiate(accept: str) -> Format:
    """Return the format that an `Accept` header requests; Prometheus text by default."""
    for part in accept.split(","):
        media, _, parameters = part.strip().partition(";")
        if media == "application/openmetrics-text" and "version=0.0.1" not in parameters:
            return Format.OPENMETRICS
    return Format.PROMETHEUS


class Renderer:
    """Renders the samples of one source, scrape after scrape.

    It caches only the series of the last scrape.
    """

    def __init__(self, format: Format) -> None:
        """Start with an empty cache."""
        self._format = format
        self._series: list[tuple[Metric, tuple[str, ...]]] = []
        self._values: list[float] = []
        self._places: list[int] = []
        """For each sample, the index of its line."""
        self._lines: list[str] = []

    def render(self, samples: Iterable[Sample]) -> str:
        """Return the families of `samples` as text, each with its HELP and TYPE.

        `Format.end` is not added. If two samples have the same labels, the first one counts.
        """
        samples = tuple(samples)
        series = [*map(series_of, samples)]
        values = [*map(value_of, samples)]
        if series != self._series:
            return "".join(self._arranged(series, values))
        lines, places = self._lines, self._places
        for at, (before, now) in enumerate(zip(self._values, values, strict=True)):
            if now != before:
                name = lines[places[at]].rpartition(" ")[0]
                lines[places[at]] = f"{name} {_written(now)}\n"
        self._values = values
        return "".join(lines)

    def _arranged(
        self, series: list[tuple[Metric, tuple[str, ...]]], values: list[float]
    ) -> list[str]:
        """Return all lines, family by family, in the order of each family's first sample.

        Cache them for the next scrape unless a series is duplicated, which is a defect: its second
        sample has no line.
        """
        names = {
            one: self._lines[place].rpartition(" ")[0]
            for one, place in zip(self._series, self._places, strict=True)
        }
        families: dict[Metric, dict[tuple[str, ...], int]] = {}
        for at, (metric, labels) in enumerate(series):
            families.setdefault(metric, {}).setdefault(labels, at)
        lines, places = [], [0] * len(series)
        for metric, family in families.items():
            lines.append(_head(metric, self._format))
            for labels, at in family.items():
                places[at] = len(lines)
                name = names.get(series[at]) or _series(metric, labels)
                lines.append(f"{name} {_written(values[at])}\n")
        if len(lines) - len(families) == len(series):
            self._series, self._values, self._places, self._lines = series, values, places, lines
        else:
            self._series, self._values, self._places, self._lines = [], [], [], []
        return lines


def render(samples: Iterable[Sample], format: Format) -> str:
    """Return the families of `samples` as text, without a cache; see `Renderer.render`."""
    return Renderer(format).render(samples)


def _written(value: float) -> str:
    return repr(float(value)) if 0 <= value < PLAIN_BELOW else number(value)


def number(value: float) -> str:
    """Return a sample's value as text as Go writes it, like Prometheus' own exporters."""
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if math.isnan(value):
        return "NaN"
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > EXPONENT_FROM:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text


def clean(label: str) -> str:
    """Return a label value without control characters and surrogates, at most 128 characters long."""
    return label.translate(_CONTROLS).encode(errors="replace").decode()[:MAX_LABEL_LENGTH]


@functools.lru_cache(maxsize=4096)
def _head(metric: Metric, format: Format) -> str:
    family, text = metric.name, metric.help.replace("\\", r"\\").replace("\n", r"\n")
    if format is Format.OPENMETRICS:
        text = text.replace('"', r"\"")
        if metric.kind is MetricKind.COUNTER:
            family = family.removesuffix("_total")
    return f"# HELP {family} {text}\n# TYPE {family} {metric.kind}\n"


def _series(metric: Metric, labels: tuple[str, ...]) -> str:
    name, pairs = metric.name, sorted(zip(metric.dimensions, labels, strict=True))
    if metric.kind is MetricKind.HISTOGRAM:
        part = labels[-1]
        name = f"{name}_{part if part in {'count', 'sum'} else 'bucket'}"
        pairs = pairs if name.endswith("_bucket") else [pair for pair in pairs if pair[0] != "le"]
    if not pairs:
        return name
    return name + "{" + ",".join(f'{key}="{_escape(clean(value))}"' for key, value in pairs) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
