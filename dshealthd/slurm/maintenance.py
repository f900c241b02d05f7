"""Maintenance as Slurm knows it: a node drained by an operator, or reserved with type MAINT.

The health check writes it to a file below `path.state`, which the agent reads. A node that
dshealthd, another health check or Slurm itself has drained is broken, not in maintenance.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from dshealthd.core import state_file
from dshealthd.maintenance.file import FILES, LIMIT, MAX_REASON, Maintenance, parse

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.slurm.controller import Controller

COUNTS = 86400.0
"""Seconds for which maintenance lasts after the last query to Slurm: a drained node that is
switched off for repair cannot query it. After that, its absence is reported again."""
_AGAIN = 0.9
"""Share of that time below which the file is rewritten; not at every check, to spare disk waits."""
_OF_FAULTS = re.compile(
    r"kill task failed|prolog|epilog|batch job complete failure|gres/|low |not responding"
    r"|node unexpectedly rebooted|duplicate jobid|nhc:",
    re.IGNORECASE,
)
"""Beginnings of the reasons that slurmctld, slurmd and LBNL's Node Health Check set for faults."""
_RESERVED = frozenset(("maint", "maintenance"))
"""Slurm's words for a node in a reservation of type MAINT: of old releases, and of present ones."""
_UNPRINTABLE = re.compile(r"[^ -~]+")


def keep(directory: Path, slurm: Controller, name: str, now: float) -> None:
    """Write the file with Slurm's current maintenance, or remove it. `now` is the Unix time in
    seconds. Raises ControllerError or OSError, and then changes nothing.
    """
    node = slurm.node(name)
    path = directory / FILES["slurm"]
    drained = node is not None and node.state.drained and not _OF_FAULTS.match(node.reason)
    if node is None or node.ours or not (drained or node.state.flags & _RESERVED):
        path.unlink(missing_ok=True)
        return
    text = node.reason or ("drained" if drained else "MAINT reservation")
    reason = _UNPRINTABLE.sub("?", text)[:MAX_REASON]
    before = _written(path)
    if before is None or before.reason != reason or before.end < now:
        before = None
    elif before.end > now + _AGAIN * COUNTS:
        return
    word = Maintenance(now if before is None else before.begin, now + COUNTS, reason)
    state_file.replace(os.fspath(path), word.encode(), durable=False)


def _written(path: Path) -> Maintenance | None:
    try:
        return parse(state_file.read(path, LIMIT))
    except (FileNotFoundError, ValueError, ArithmeticError):
        return None
