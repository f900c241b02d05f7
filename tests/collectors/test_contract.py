"""What every collector keeps to, whatever it reads."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from dshealthd import collectors
from dshealthd.config import registry
from dshealthd.core.exposition import render

FORBIDDEN = {
    "asyncio", "concurrent", "dshealthd.core.background", "dshealthd.core.timing",
    "multiprocessing", "signal", "subprocess", "threading",
}  # fmt: skip
"""Modules that a reader of one source has no use for: a loop, timers, threads, children."""


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a file imports anywhere, with the names taken from them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("name", [*registry.all_collectors()])
def test_collectors_are_synchronous(name: str) -> None:
    """A collector has no loop, timer, thread or child of its own: services have."""
    path = Path(next(iter(collectors.__path__))) / f"{name}.py"
    found = imported(ast.parse(path.read_text(encoding="utf-8")))
    assert {module for module in found if module in FORBIDDEN} == set()


def test_metrics_are_sound() -> None:
    """Promtool has nothing to say about names, types and help, of whatever a collector exports."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool comes with Debian's prometheus; ./dev test installs it"
    metrics = [
        metric
        for collector in registry.all_collectors().values()
        for metric in registry.metrics(collector).values()
    ]
    text = render([metric(1, *metric.labels) for metric in metrics])
    check = subprocess.run(
        [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
    )
    assert (check.returncode, check.stdout + check.stderr) == (0, "")


def test_a_loop_would_be_seen() -> None:
    """An import inside a function or by name counts too."""
    text = "def collect(self):\n    from dshealthd.core import background\n    import asyncio\n"
    assert imported(ast.parse(text)) >= {"dshealthd.core.background", "asyncio"}
