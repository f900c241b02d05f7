"""Running one step as a collection does."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dshealthd.linux import forked
from dshealthd.linux.forked import Ended, Function

DEADLINE = 60.0


def take(
    function: Function, seconds: float = 60.0, max_bytes: int = 1 << 20
) -> tuple[Ended, dict[str, bytes]]:
    """Run a step; return how it ended, and the content of the files that it emitted."""
    files: dict[str, bytes] = {}

    def keep(name: str, data: bytes) -> None:
        files[name] = files.get(name, b"") + data

    return forked.run("one", function, seconds, max_bytes, keep), files


def clock_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what lets DEADLINE pass for the steps that run, at once."""
    ahead = 0.0

    def pass_deadline() -> None:
        nonlocal ahead
        ahead += DEADLINE

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(forked, "time", clock)
    return pass_deadline
