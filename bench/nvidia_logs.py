"""The logs of NVIDIA's own tests of their Restart Agent, read out of the tests' source.

Nothing of theirs is kept here or run: the texts that each test writes as its log are evaluated from
literals, joins and sums alone.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATTERN = "test_restart_agent*.py"


def logs(folder: Path) -> dict[str, str]:
    """Return each distinct log by the test that writes it; `folder` is `tests/attribution/unit`."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob(PATTERN)):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for number, text in enumerate(_written(function)):
                    if text not in found.values():
                        found[f"{function.name} {number}"] = text
    return found


def _written(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "write_text"
            and node.args
        ):
            try:
                value = _value(node.args[0])
            except ValueError:  # made by a call of theirs
                continue
            if isinstance(value, str) and value.strip():
                yield value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            found: list[Any] = []
            for element in elements:
                if isinstance(element, ast.Starred):
                    found += _value(element.value)
                else:
                    found.append(_value(element))
            return found
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.Call(func=ast.Attribute(value=glue, attr="join"), args=[parts]):
            return _value(glue).join(_value(parts))
    message = f"line {node.lineno}: no literal"
    raise ValueError(message)
