"""Series: samples as the rules of findings ask for them, by metric and by the values of labels."""

from __future__ import annotations

import functools
import operator
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from dshealthd.core.collector import Sample


_QUERY = re.compile(
    r"dshealthd_(?P<name>\w+)(?:{(?P<matchers>.*)})?"
    r"(?: *(?P<compare>[=!]=|[<>]=?) *(?P<clock>time\(\) - )?(?P<number>[\d.e+-]+))?"
)
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_OF_TARGETS = frozenset(("instance", "node", "cluster", "leaf", "job"))
"""Labels that a scrape adds: all samples here are of this node."""


class Point(NamedTuple):
    """One series and its value now."""

    labels: Mapping[str, str]
    value: float


class Series:
    """All samples of one moment.

    Labels are taken apart only for the metrics that are asked for: a node with eight GPUs has
    thousands of samples, and a rule reads a few.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        """Index `samples` by the names of their metrics without `dshealthd_`."""
        self._samples: dict[str, list[Sample]] = {}
        for sample in samples:
            self._samples.setdefault(sample.metric.name, []).append(sample)
        self._points: dict[str, list[Point]] = {}

    def __call__(self, name: str, **labels: str | Collection[str]) -> Iterator[Point]:
        """Yield the series of `dshealthd_NAME` with these labels, each a value or a set of them.

        A name that begins with `process_` is the agent's own, and stands for itself.
        """
        wanted = [
            (key, (values,) if isinstance(values, str) else values)
            for key, values in labels.items()
        ]
        for point in self._named(name):
            for key, values in wanted:
                if point.labels.get(key) not in values:
                    break
            else:
                yield point

    def _named(self, name: str) -> list[Point]:
        points = self._points.get(name)
        if points is None:
            full = name if name.startswith("process_") else f"dshealthd_{name}"
            samples = self._samples.get(full, ())
            dimensions = samples[0].metric.dimensions if samples else ()
            points = self._points[name] = [
                Point(_labels(dimensions, values), value) for _, values, value in samples
            ]
        return points

    def drop(self, name: str, over: Callable[[Point], bool]) -> None:
        """Leave out those series of `dshealthd_NAME` that are `over`."""
        self._points[name] = [point for point in self._named(name) if not over(point)]

    def value(self, name: str, **labels: str | Collection[str]) -> float | None:
        """Return the value of the first such series; None where it is not known."""
        return next((point.value for point in self(name, **labels)), None)

    def parts(self, name: str, *keys: str, **labels: str | Collection[str]) -> set[tuple[str, ...]]:
        """Return the values of `keys` for which there is such a series that is not 0."""
        return {
            tuple(point.labels[key] for key in keys)
            for point in self(name, **labels)
            if point.value
        }

    def query(self, text: str, wall: float) -> list[Point]:
        """Answer a query of an alert's text at Unix time `wall`, as far as this node's samples can.

        Known is one selector, and its comparison with a number or a time. What is more (an
        aggregation, other nodes) finds nothing, as where Prometheus has no such series.
        """
        match = _QUERY.fullmatch(text.strip())
        if match is None:
            return []
        matchers = [
            ("job" if label == "exported_job" else label, how, value)
            for label, how, value in _MATCHER.findall(match["matchers"] or "")
            if label not in _OF_TARGETS
        ]
        found = [
            point
            for point in self(match["name"])
            if all(
                _matches(point.labels.get(label, ""), how, value) for label, how, value in matchers
            )
        ]
        if match["compare"] is None:
            return found
        number = float(match["number"])
        limit = wall - number if match["clock"] else number
        return [point for point in found if _COMPARE[match["compare"]](point.value, limit)]


@functools.lru_cache(maxsize=2048)
def _labels(dimensions: tuple[str, ...], values: tuple[str, ...]) -> Mapping[str, str]:
    """Name the values of labels. A series has the same ones at the next moment, and to name them
    was half of what the agent spends on judging.
    """
    return MappingProxyType(dict(zip(dimensions, values, strict=True)))


def _matches(text: str, how: str, value: str) -> bool:
    """Compare a series' label as a matcher of Prometheus does."""
    same = re.fullmatch(value, text) is not None if how.endswith("~") else text == value
    return same != how.startswith("!")
