"""What a query makes Prometheus read, reckoned from the query.

A property of it, unlike the time that a busy machine takes for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import promql_parser

SCRAPE_SECONDS = 5.0
STEPS = 240
"""Points of a graph that is half a screen wide."""

_CHILDREN = ("expr", "lhs", "rhs")


def samples(expr: str, count: Callable[[str], int], *, steps: int = STEPS) -> int:
    """Return how many samples an expression reads for a graph of `steps` points (1.

    An instant query).

    `count` returns how many series a selector has. Functions of a range read every sample in it, at
    every step.
    """
    return round(_samples(promql_parser.parse(expr), functools.cache(count), steps))


def _samples(node: promql_parser.Expr, count: Callable[[str], int], times: float) -> float:
    if isinstance(node, promql_parser.VectorSelector):
        return count(_bare(node)) * (1 if node.at else times)
    if isinstance(node, promql_parser.MatrixSelector):
        selector = node.vector_selector
        return (
            count(_bare(selector))
            * (node.range.total_seconds() / SCRAPE_SECONDS)
            * (1 if selector.at else times)
        )
    if isinstance(node, promql_parser.SubqueryExpr):
        assert node.range is not None
        assert node.step is not None
        return _samples(node.expr, count, (1 if node.at else times) * (node.range / node.step))
    children = [child for name in _CHILDREN if (child := getattr(node, name, None)) is not None]
    children += [
        argument
        for argument in getattr(node, "args", [])
        if isinstance(argument, promql_parser.Expr)
    ]
    return sum(_samples(child, count, times) for child in children)


def _bare(selector: promql_parser.VectorSelector) -> str:
    """Return a selector without what it says of time."""
    name, brace, rest = selector.prettify().partition("{")
    return name + brace + rest[: rest.rindex("}") + 1] if brace else name.split()[0]
