"""PromQL expressions of alerts: the names of their metrics and the labels in their selectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from deploy import tier


class Selector(NamedTuple):
    """A metric and the names of the labels in its selector."""

    metric: str
    labels: frozenset[str]
    past: bool
    """Whether it is read as it was, by an `offset`."""


def selectors(expression: str) -> Iterator[Selector]:
    """Yield every selector of an expression that names its metric.

    Selectors such as `{__name__=~"…"}` are not found.
    """
    for selector in tier.selectors(expression):
        if selector.name:
            names = frozenset(matcher.name for matcher in selector.matchers.matchers)
            yield Selector(selector.name, names, selector.offset is not None)
