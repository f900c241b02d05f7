"""Running one step as a collection does."""

from __future__ import annotations

from dshealthd.linux import forked
from dshealthd.linux.forked import Ended, Function


def take(
    function: Function, seconds: float = 60.0, max_bytes: int = 1 << 20
) -> tuple[Ended, dict[str, bytes]]:
    """Run a step; return how it ended, and the content of the files that it emitted."""
    files: dict[str, bytes] = {}

    def keep(name: str, data: bytes) -> None:
        files[name] = files.get(name, b"") + data

    return forked.run("one", function, seconds, max_bytes, keep), files
