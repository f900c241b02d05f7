"""Flight-recorder dumps beside the logs, taken apart by a process of nobody's.

Run as `python -m dshealthd.explain.dumps` with the dump as standard input.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""Of one dump: 20,000 entries with stacks take 20 MB."""
MEMORY = 2 << 30
SECONDS = 20
_RANK = re.compile(r"(?P<rank>\d{1,6})(?:\.\w+)?$")


class UnreadableDump(Exception):
    """A dump cannot be read; says why."""


def is_dump(name: str) -> bool:
    """Tell whether a file beside the logs is a flight recorder's pickle, by what it begins with."""
    if name == "-" or not Path(name).is_file():
        return False
    with open(name, "rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] in range(2, 6)  # noqa: PLR2004 - PROTO, version


def rank_of(name: str) -> int | None:
    """Return the rank at the end of a flight recorder dump's name, where torch writes it."""
    match = _RANK.search(Path(name).name)
    return int(match["rank"]) if match else None


def digest(name: str) -> dict[str, Any]:
    """Return what a flight recorder's dump says; `UnreadableDump` if it is none or too much."""
    import subprocess  # most logs have no dumps beside them, and reading one takes 0.1 s

    with open(name, "rb") as file:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "dshealthd.explain.dumps"],
                stdin=file, capture_output=True, check=False, timeout=2 * SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            message = f"{name}: no answer after {2 * SECONDS} s"
            raise UnreadableDump(message) from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        message = f"{name}: {lines[-1] if lines else f'exit status {done.returncode}'}"
        raise UnreadableDump(message)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> int:
    """Read the flight recorder's dump of standard input without any right."""
    from dshealthd.evidence import dump, privileges

    privileges.become(privileges.NOBODY)
    privileges.confine(MEMORY, SECONDS)
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        print(f"more than {MAX_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    try:
        print(json.dumps(dump.digest(data)))
    except (dump.MalformedDump, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
