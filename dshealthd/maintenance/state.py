"""The state of this node's maintenance, in files below `path.state`.

Whoever may write to that directory may set it: root, and the user that the agent runs as.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

FILES = {"operator": "maintenance.json", "slurm": "maintenance-slurm.json"}
"""The file of each source: a person with `dshealthd maintenance`, and Slurm's drain or MAINT."""
LIMIT = 4096
"""Bytes of a file that are read; one that is written here has some 200."""
MAX_REASON = 80
"""Characters of a reason, which becomes a label."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """One source's word that the node is in maintenance."""

    begin: float
    """Unix time in seconds, as the next one."""
    end: float
    """When it is over by itself."""
    reason: str

    def encode(self) -> bytes:
        """Return the content of the maintenance's file."""
        return json.dumps(asdict(self)).encode() + b"\n"


def parse(text: str) -> Maintenance:
    """Return the maintenance that a file says; ValueError names what is wrong with it."""
    try:
        table = json.loads(text)
        found = Maintenance(
            float(table["begin"]), float(table["end"]), str(table["reason"])[:MAX_REASON]
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"is not what `dshealthd maintenance` writes: {error!r}"
        raise ValueError(message) from error
    if not (math.isfinite(found.begin) and math.isfinite(found.end)):
        message = "begin and end must be Unix times in seconds"
        raise ValueError(message)
    return found
