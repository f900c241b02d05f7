"""Templates of alert texts, rendered on the node as Prometheus would.

A finding therefore uses the words of its alert.

Only what the alerts use of Go's templates is supported: `$labels`, `$value`, `if`, `with`, `range`,
the comparisons, and Prometheus' functions that format numbers. The caller, which has the samples of
one node, answers queries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.symptoms import sentence

if TYPE_CHECKING:
    from collections.abc import Mapping

Query = Callable[[str], Sequence[Any]]
_ACTION = re.compile(r"{{-?\s*(.*?)\s*-?}}", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|`[^`]*`|\||\(|\)|[^\s|()]+')
_BLOCKS = frozenset(("if", "with", "range"))
_LITERAL = re.compile(r"-?\d+(\.\d+)?")


class TemplateError(ValueError):
    """The template uses something that is not supported here."""


@dataclass(slots=True)
class _Node:
    """A text, an action, or a block with its branches."""

    text: str = ""
    action: str = ""
    block: str = ""
    branches: list[tuple[str, list[_Node]]] = field(default_factory=list)
    """Each condition, empty for `else`, and the nodes of its branch."""


class _Scope:
    """The labels, value and functions that a template can use."""

    def __init__(self, labels: Mapping[str, str], value: float | None, query: Query) -> None:
        self.labels = labels
        self.value = value
        self.functions = {**_FUNCTIONS, "query": query}


def render(
    template: str,
    labels: Mapping[str, str],
    value: float | None,
    query: Query = lambda _text: (),
) -> str:
    """Return the rendered text of a template for an alert with these labels and this value.

    `query` returns the results of an instant query, each with `labels` and `value`. Raise
    TemplateError if the template uses anything unsupported.
    """
    pieces = _ACTION.split(template)
    nodes, rest = _parse(pieces)
    if rest:
        message = f"{{{{ {rest[1]} }}}} without a block"
        raise TemplateError(message)
    return "".join(_written(nodes, _Scope(labels, value, query), None))


def _parse(pieces: list[str]) -> tuple[list[_Node], list[str]]:
    """Return a template's nodes up to an `else` or `end` of an outer block, and the rest."""
    nodes = []
    while pieces:
        nodes.append(_Node(text=pieces[0]))
        if len(pieces) == 1:
            return nodes, []
        action = pieces[1]
        word = action.partition(" ")[0]
        if word in {"else", "end"}:
            return nodes, ["", *pieces[1:]]
        if word in _BLOCKS:
            node, pieces = _block(word, action.removeprefix(word).strip(), pieces[2:])
            nodes.append(node)
        else:
            nodes.append(_Node(action=action))
            pieces = pieces[2:]
    return nodes, []


def _block(word: str, condition: str, pieces: list[str]) -> tuple[_Node, list[str]]:
    """Return a block of a template and the pieces after its `end`."""
    node = _Node(block=word)
    while True:
        body, rest = _parse(pieces)
        node.branches.append((condition, body))
        if not rest:
            message = f"{{{{ {word} }}}} without end"
            raise TemplateError(message)
        action, pieces = rest[1], rest[2:]
        if action == "end":
            return node, pieces
        condition = action.removeprefix("else").strip().removeprefix("if").strip()


def _written(nodes: list[_Node], scope: _Scope, dot: Any) -> list[str]:
    written = []
    for node in nodes:
        if node.text:
            written.append(node.text)
        elif node.action:
            written.append(_plain(_evaluate(node.action, scope, dot)))
        for condition, body in node.branches:
            found: Any = None
            if condition:
                found = _evaluate(condition, scope, dot)
                if not found:
                    continue
            if condition and node.block == "range":
                written += [text for item in found for text in _written(body, scope, item)]
            else:
                inner = found if condition and node.block == "with" else dot
                written += _written(body, scope, inner)
            break
    return written


def _evaluate(expression: str, scope: _Scope, dot: Any) -> Any:
    """Return the value of a template pipeline."""
    stages: list[list[Any]] = [[]]
    tokens = _TOKEN.findall(expression)
    if "(" in tokens:
        message = f"{expression}: brackets are not known"
        raise TemplateError(message)
    for token in tokens:
        if token == "|":  # noqa: S105 - no password
            stages.append([])
        else:
            stages[-1].append(token)
    found: Any = None
    for number, (first, *arguments) in enumerate(stages):
        given = [_operand(argument, scope, dot) for argument in arguments]
        if number:
            given.append(found)
        found = (
            scope.functions[first](*given)
            if first in scope.functions
            else _operand(first, scope, dot)
        )
    return found


def _operand(token: str, scope: _Scope, dot: Any) -> Any:
    if token.startswith("$labels."):
        return scope.labels.get(token.removeprefix("$labels."), "")
    if token == "$value":  # noqa: S105 - no password
        return scope.value
    if token.startswith(".Labels."):
        return dot.labels.get(token.removeprefix(".Labels."), "")
    if token == ".Value":  # noqa: S105 - no password
        return dot.value
    if token == ".":  # noqa: S105 - no password
        return dot
    if token[0] in '"`':
        return token[1:-1]
    if _LITERAL.fullmatch(token):
        return float(token)
    message = f"{token} is not known"
    raise TemplateError(message)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.12g}" if isinstance(value, float | int) else str(value)


def _number(function: Any) -> Any:
    """Return a template function that formats a number, and returns "unknown" for None."""
    return lambda value: "unknown" if value is None else function(value)


_FUNCTIONS: Mapping[str, Any] = {
    "eq": lambda one, *others: one in others,
    "ne": lambda one, other: one != other,
    "lt": lambda one, other: one is not None and one < other,
    "gt": lambda one, other: one is not None and one > other,
    "not": lambda one: not one,
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "match": lambda pattern, text: re.search(pattern, text) is not None,
    "printf": lambda text, *values: (
        text.replace("%q", '"%s"') % values if None not in values else "unknown"
    ),
    "first": lambda found: found[0],
    "value": lambda found: found.value,
    "label": lambda name, found: found.labels.get(name, ""),
    "humanize": _number(sentence.humanize),
    "humanize1024": _number(sentence.humanize1024),
    "humanizePercentage": _number(sentence.percentage),
    "humanizeDuration": _number(sentence.duration),
}
