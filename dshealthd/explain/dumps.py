"""Flight-recorder dumps next to the logs, parsed in a process that runs as nobody.

Run as `python -m dshealthd.explain.dumps` with the dump on standard input.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from dshealthd.explain.input import open_file

MAX_BYTES = 64 << 20
"""Maximum bytes of a dump; 20,000 entries with stacks take 20 MB."""
MEMORY = 2 << 30
SECONDS = 20
_RANK = re.compile(r"(?P<rank>\d{1,6})(?:\.\w+)?$")


class UnreadableDump(Exception):
    """A dump cannot be read; the message says why."""


def is_dump(name: str) -> bool:
    """Return by its first bytes whether a file is a flight recorder's pickle."""
    if name == "-" or not Path(name).is_file():
        return False
    with open_file(name) as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] in range(2, 6)  # noqa: PLR2004 - PROTO, version


def rank_of(name: str) -> int | None:
    """Return the rank at the end of a dump's name, where torch writes it; None without one."""
    match = _RANK.search(Path(name).name)
    return int(match["rank"]) if match else None


def digest(name: str) -> dict[str, Any]:
    """Return the digest of a flight recorder's dump; UnreadableDump if it is not one or too large."""
    # Only for dumps, which are rare and take 0.1 s to read.
    import subprocess

    from dshealthd.core import child

    with open_file(name) as file:
        try:
            done = subprocess.run(  # noqa: S603 - our own module
                child.python("dshealthd.explain.dumps"),
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
    """Read the dump on standard input without any privileges, and print its digest."""
    from dshealthd.explain import flight_recorder
    from dshealthd.linux import privileges

    privileges.become(privileges.NOBODY)
    privileges.confine(MEMORY, SECONDS)
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        print(f"more than {MAX_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    try:
        print(json.dumps(flight_recorder.digest(data)))
    except (flight_recorder.MalformedDump, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
