"""axe, the accessibility checker, run in a page that is open.

The script comes with axe-playwright-python, which ./dev test installs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

SPECIFICATION = importlib.util.find_spec("axe_playwright_python")
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


def script() -> str:
    """Return axe's source."""
    assert SPECIFICATION is not None
    assert SPECIFICATION.origin is not None
    return (Path(SPECIFICATION.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def violations(page: Page) -> list[str]:
    """Return what axe finds wrong with a page, one line for each rule and place."""
    page.evaluate(script())  # by the debugger, which the page's Content-Security-Policy allows
    found: dict[str, Any] = page.evaluate(
        # Of what passes one node for each rule: to describe all takes longer than to check them.
        "(tags) => axe.run(document, {"
        " runOnly: { type: 'tag', values: tags }, resultTypes: ['violations'] })",
        list(RULES),
    )
    assert len(found["passes"]) > 10, "axe has checked nothing"
    return [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]
