"""The exposition: samples as Prometheus text, and its tiers: all series, or only those that the
shipped rules read.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from importlib import resources
from typing import NamedTuple

from dshealthd.core.collector import Metric, MetricKind, Sample
from dshealthd.core.documents import cut

MAX_LABEL_LENGTH = 128
EXPONENT_FROM = 1e6
"""Numbers from here on get an exponent."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""OpenMetrics would add only what the agent does not export: exemplars and creation times."""
_CONTROLS = dict.fromkeys((*range(32), 127))
FILE = "verdict.tier"
"""The generated selectors, beside this module."""
_LINE = re.compile(r"(\w+)(?:\{(.*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"(?:,|$)')


class Renderer:
    """Renders the samples of one source, scrape after scrape.

    It caches only the names of the last scrape's series.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[Metric, tuple[str, ...]], str] = {}

    def render(self, samples: Iterable[Sample]) -> str:
        """Return the exposition of `samples`: families with their HELP and TYPE, in the order of
        each family's first sample.

        If two samples have the same labels, the first one counts.
        """
        names: dict[tuple[Metric, tuple[str, ...]], str] = {}
        families: dict[Metric, list[str]] = {}
        for metric, labels, value in samples:
            series = metric, labels
            if series in names:
                continue
            name = names[series] = self._names.get(series) or _series(metric, labels)
            if metric not in families:
                families[metric] = [_head(metric)]
            families[metric].append(f"{name} {number(value)}\n")
        self._names = names
        return "".join(itertools.chain.from_iterable(families.values()))


def render(samples: Iterable[Sample]) -> str:
    """Return the exposition of `samples`, without a cache; see `Renderer.render`."""
    return Renderer().render(samples)


def number(value: float) -> str:
    """Return a sample's value as text as Go writes it, like Prometheus' own exporters."""
    text = repr(float(value))
    if value < EXPONENT_FROM:
        return text if value != -math.inf else "-Inf"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf"
    if "e" in text:  # as Python writes numbers from 1e16 on
        return text
    whole, _, rest = text.partition(".")
    mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
    return f"{mantissa}e+{len(whole) - 1:02d}"


def clean_label(label: str) -> str:
    """Return a label value without control characters and surrogates, at most 128 characters
    long.
    """
    return cut(label.translate(_CONTROLS), MAX_LABEL_LENGTH)


@functools.cache
def _head(metric: Metric) -> str:
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {text}\n# TYPE {metric.name} {metric.kind}\n"


def _series(metric: Metric, labels: tuple[str, ...]) -> str:
    name, pairs = metric.name, sorted(zip(metric.dimensions, labels, strict=True))
    if metric.kind is MetricKind.HISTOGRAM:
        part = labels[-1]
        name = f"{name}_{part if part in {'count', 'sum'} else 'bucket'}"
        pairs = pairs if name.endswith("_bucket") else [pair for pair in pairs if pair[0] != "le"]
    if not pairs:
        return name
    return (
        name
        + "{"
        + ",".join(f'{key}="{_escape(clean_label(value))}"' for key, value in pairs)
        + "}"
    )


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class Tier(enum.StrEnum):
    """How much a scrape gets."""

    ALL = "all"
    VERDICT = "verdict"


class Matcher(NamedTuple):
    """One label matcher of a selector."""

    label: str
    operator: str
    value: str

    def matches(self, value: str) -> bool:
        """Return whether a label's value matches; patterns match the whole value, as in PromQL."""
        if self.operator in {"=", "!="}:
            return (value == self.value) is (self.operator == "=")
        return bool(re.fullmatch(self.value, value)) is (self.operator == "=~")

    def __str__(self) -> str:
        value = self.value.replace("\\", r"\\").replace('"', r"\"")
        return f'{self.label}{self.operator}"{value}"'


class Selector(NamedTuple):
    """The series of one family that match all of some matchers."""

    family: str
    matchers: tuple[Matcher, ...] = ()

    def __str__(self) -> str:
        matchers = ",".join(map(str, self.matchers))
        return f"{self.family}{{{matchers}}}" if matchers else self.family


def parse_selectors(text: str) -> tuple[Selector, ...]:
    """Return the selectors of a tier's file: one on each line, but for comments.

    Raises ValueError for a line that is none.
    """
    found = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        whole = _LINE.fullmatch(line)
        matchers = tuple(_MATCHER.finditer(whole[2] or "")) if whole else ()
        if whole is None or "".join(match[0] for match in matchers) != (whole[2] or ""):
            raise ValueError(f"{line!r} is not a selector")
        found.append(
            Selector(
                whole[1],
                tuple(Matcher(one[1], one[2], re.sub(r"\\(.)", r"\1", one[3])) for one in matchers),
            )
        )
    return tuple(found)


def chooser(selectors: Iterable[Selector]) -> Callable[[Sample], bool]:
    """Return the function that says whether any of the selectors chooses a sample.

    Matchers of labels that a metric does not have are about its target: they leave nothing out.
    """
    by_family: dict[str, list[tuple[Matcher, ...]]] = {}
    for selector in selectors:
        by_family.setdefault(selector.family, []).append(selector.matchers)
    resolved: dict[str, list[list[tuple[int, Matcher]]] | bool] = {}

    def resolve(metric: Metric) -> list[list[tuple[int, Matcher]]] | bool:
        """Return the places of the labels that selectors match; a bool if they match none."""
        found = [
            [
                (metric.dimensions.index(matcher.label), matcher)
                for matcher in matchers
                if matcher.label in metric.dimensions
            ]
            for matchers in by_family.get(metric.name, ())
        ]
        return found if all(found) and found else bool(found)

    def chooses(sample: Sample) -> bool:
        name = sample.metric.name
        choice = resolved.get(name)
        if choice is None:
            choice = resolved[name] = resolve(sample.metric)
        if isinstance(choice, bool):
            return choice
        labels = sample.labels
        return any(
            all(matcher.matches(labels[place]) for place, matcher in alternative)
            for alternative in choice
        )

    return chooses


_VERDICT = parse_selectors(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
"""Read with the module, as the event loop waits for no disk."""


@functools.cache
def verdict_chooser() -> Callable[[Sample], bool]:
    """Return the function that says whether the shipped rules read a sample."""
    return chooser(_VERDICT)
