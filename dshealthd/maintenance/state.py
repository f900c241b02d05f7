"""The state of this node's maintenance, in files below `path.state`.

Anyone who may write to that directory may set it: root, and the user that the agent runs as.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

FILES = {"operator": "maintenance.json", "slurm": "maintenance-slurm.json"}
"""The file of each source: a person with `dshealthd maintenance`, and Slurm's drain or MAINT."""
LIMIT = 4096
"""Most bytes of a file that are read; a genuine one has some 200."""
MAX_REASON = 80
"""Characters of a reason, which becomes a label."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """One source's statement that the node is in maintenance."""

    begin: float
    """Unix time in seconds."""
    end: float
    """Unix time in seconds at which maintenance ends by itself."""
    reason: str

    def encode(self) -> bytes:
        """Return the content of the file for this maintenance."""
        return json.dumps(asdict(self)).encode() + b"\n"


def parse(text: str | bytes) -> Maintenance:
    """Return the maintenance in a file's text. Raises ValueError, which says what is wrong."""
    try:
        table = json.loads(text)
        found = Maintenance(
            float(table["begin"]), float(table["end"]), str(table["reason"])[:MAX_REASON]
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"not a file that `dshealthd maintenance` wrote: {error!r}"
        raise ValueError(message) from error
    if not (math.isfinite(found.begin) and math.isfinite(found.end)):
        message = "begin and end must be Unix times in seconds"
        raise ValueError(message)
    return found
