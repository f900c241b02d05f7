"""Running one step as a collection does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.evidence.step import RunningStep, run_one

if TYPE_CHECKING:
    from dshealthd.evidence.step import Function


def take(
    function: Function, seconds: float = 60.0, max_bytes: int = 1 << 20
) -> tuple[RunningStep, dict[str, bytes]]:
    """Run a step; return it, and the content of the files that it emitted."""
    files: dict[str, bytes] = {}

    def keep(name: str, data: bytes) -> None:
        files[name] = files.get(name, b"") + data

    return run_one("one", function, seconds, max_bytes, keep), files
