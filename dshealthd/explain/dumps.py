"""Flight-recorder dumps next to the logs, parsed in a process that runs as nobody."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dshealthd.explain import flight_recorder
from dshealthd.explain.input import open_file

if TYPE_CHECKING:
    from dshealthd.linux.forked import Emit, Ended

MAX_DUMP = 32 << 20
"""Bytes. 2,000 entries, torch's default, take some 2 MiB; 20,000 with stacks take 20."""
MEMORY = 1 << 30
"""Memory limit in bytes for parsing a dump; the largest dump fits."""
SECONDS = 10
_RANK = re.compile(r"(?P<rank>\d{1,6})(?:\.\w+)?$")


class UnreadableDump(Exception):
    """A dump cannot be read; the message says why."""


def is_dump(name: str) -> bool:
    """Return by its first bytes whether a file is a flight recorder's pickle."""
    if name == "-" or not Path(name).is_file():
        return False
    with open_file(name) as file:
        head = file.read(2)
    # The opcode PROTO, and its version.
    return len(head) == 2 and head[0] == 0x80 and head[1] in range(2, 6)  # noqa: PLR2004


def rank_of(name: str) -> int:
    """Return the rank at the end of a dump's name, where torch writes it; UnreadableDump without
    one.
    """
    match = _RANK.search(Path(name).name)
    if match is None:
        raise UnreadableDump(f"{name}: a dump's name must end with its rank")
    return int(match["rank"])


def read(name: str) -> dict[str, Any]:
    """Return the digest of a file; UnreadableDump if it is no dump or too large."""
    with open_file(name) as file:
        data = file.read(MAX_DUMP + 1)
    if len(data) > MAX_DUMP:
        raise UnreadableDump(f"{name}: more than {MAX_DUMP >> 20} MiB")
    step = digested(name, data)
    if step.problem:
        raise UnreadableDump(f"{name}: {step.problem}")
    digest: dict[str, Any] = step.value
    return digest


def digested(name: str, data: bytes) -> Ended:
    """Return the digest of a dump, or why there is none."""
    from dshealthd.linux import forked  # only for dumps, as it takes longer than reading a log

    return forked.run(name, functools.partial(digest_as_nobody, data=data), SECONDS + 5.0)


def digest_as_nobody(_emit: Emit, data: bytes) -> dict[str, Any]:
    """Parse a dump as user nobody, within limits on memory and CPU time."""
    from dshealthd.linux import privileges
    from dshealthd.linux.forked import Missing

    privileges.become(privileges.NOBODY)
    privileges.end_with_parent()
    privileges.confine(MEMORY, SECONDS)
    try:
        return flight_recorder.digest(data)
    except flight_recorder.MalformedDump as error:
        raise Missing(str(error)) from error
