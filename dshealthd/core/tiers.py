"""Tiers of the exposition: all series, or only those that the shipped rules read.

A tier is a list of selectors, written as in PromQL. That of the rules, `verdict.tier`, is generated
from their expressions; a scrape asks for it by `/metrics?tier=verdict`.
"""

from __future__ import annotations

import enum
import functools
import re
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dshealthd.core.collector import Metric, Sample

FILE = "verdict.tier"
"""The generated selectors, beside this module."""
_LINE = re.compile(r"(\w+)(?:\{(.*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"(?:,|$)')


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
        """Return the matcher as PromQL has it."""
        value = self.value.replace("\\", r"\\").replace('"', r"\"")
        return f'{self.label}{self.operator}"{value}"'


class Selector(NamedTuple):
    """The series of one family that match all of some matchers."""

    family: str
    matchers: tuple[Matcher, ...] = ()

    def __str__(self) -> str:
        """Return the selector as PromQL has it."""
        matchers = ",".join(map(str, self.matchers))
        return f"{self.family}{{{matchers}}}" if matchers else self.family


def parsed(text: str) -> tuple[Selector, ...]:
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
            message = f"{line!r} is not a selector"
            raise ValueError(message)
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
        """Return the places of the labels that count; a bool if none does."""
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


_VERDICT = parsed(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
"""Read with the module, as the event loop waits for no disk."""


@functools.cache
def verdict() -> Callable[[Sample], bool]:
    """Return the function that says whether the shipped rules read a sample."""
    return chooser(_VERDICT)
