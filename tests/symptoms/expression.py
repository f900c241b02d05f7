"""PromQL expressions of alerts: the names of their metrics and the labels in their selectors.

This is not a parser (promtool is), but it finds names well enough to prove that each one exists.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`')
_COMMENT = re.compile(r"#[^\n]*")
_LABELS = re.compile(
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", re.IGNORECASE
)
_SELECTOR = re.compile(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\s*\()(?![\w:])")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAMELESS = re.compile(r"(?<![\w:])\s*\{[^}]*\}")
_LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")
_WORDS = frozenset(
    {
        "and",
        "or",
        "unless",
        "bool",
        "offset",
        "inf",
        "nan",
        "atan2",
        "group_left",
        "group_right",
        "start",
        "end",
    }
)


class Selector(NamedTuple):
    """A metric and the names of the labels in its selector."""

    metric: str
    labels: frozenset[str]


def selectors(expression: str) -> Iterator[Selector]:
    """Yield every selector of an expression that names its metric.

    Selectors such as `{__name__=~"…"}` are not found.
    """
    bare = _LABELS.sub(" ", _COMMENT.sub("", _STRING.sub('""', expression)))
    for match in _SELECTOR.finditer(_NAMELESS.sub("", _RANGE.sub("", bare))):
        if match[1].lower() not in _WORDS:
            yield Selector(match[1], frozenset(_LABEL.findall(match[2] or "")))
