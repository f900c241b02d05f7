"""Maintenance by Slurm's word: a node drained by an operator, or reserved with type MAINT.

The health check writes it below `path.state`, from where the agent reads it. A node that dshealthd,
another health check or Slurm itself has drained is broken and not in maintenance.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Protocol

from dshealthd.core import state_file
from dshealthd.core.host import read
from dshealthd.maintenance.state import FILES, LIMIT, MAX_REASON, Maintenance, parse

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.slurm.controller import SlurmNode

COUNTS = 86400.0
"""Seconds for which Slurm's word counts after it was asked last: a drained node is switched off for
repair, and cannot ask any more. Later its absence is told again."""
_AGAIN = 0.9
"""Share of it that is left when it is written anew: not at every check, as the disk is waited for."""
_OF_FAULTS = re.compile(
    r"kill task failed|prolog|epilog|batch job complete failure|gres/|low |not responding"
    r"|node unexpectedly rebooted|duplicate jobid|nhc:",
    re.IGNORECASE,
)
"""How reasons begin that slurmctld, slurmd and LBNL's Node Health Check write for a fault."""
_UNPRINTABLE = re.compile(r"[^ -~]+")


class NodeSource(Protocol):
    """What is asked of `controller.Controller`."""

    def node(self, name: str) -> SlurmNode | None:
        """Return one node, whose maintenance Slurm tells."""


def keep(directory: Path, slurm: NodeSource, name: str, now: float) -> None:
    """Keep what Slurm says of maintenance now; ControllerError, OSError, and nothing is changed.

    `now` is the Unix time in seconds.
    """
    node = slurm.node(name)
    place = directory / FILES["slurm"]
    drained = node is not None and node.state.drained and not _OF_FAULTS.match(node.reason)
    if node is None or node.ours or not (drained or "maint" in node.state.flags):
        place.unlink(missing_ok=True)
        return
    text = node.reason or ("drained" if drained else "MAINT reservation")
    reason = _UNPRINTABLE.sub("?", text)[:MAX_REASON]
    before = _written(place)
    if before is None or before.reason != reason or before.end < now:
        before = None
    elif before.end > now + _AGAIN * COUNTS:
        return
    word = Maintenance(now if before is None else before.begin, now + COUNTS, reason)
    state_file.replace(os.fspath(place), word.encode(), durable=False)


def _written(place: Path) -> Maintenance | None:
    """Return the maintenance that the last run wrote for Slurm; None if there is nothing usable."""
    try:
        return parse(read(str(place), LIMIT))
    except (FileNotFoundError, ValueError):
        return None
