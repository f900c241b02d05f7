"""PromQL expressions of alerts: the names of their metrics and the labels in their selectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import promql_parser


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
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    for selector in found:
        if selector.name:
            matchers = selector.matchers.matchers
            names = frozenset(matcher.name for matcher in matchers)
            yield Selector(selector.name, names, selector.offset is not None)
