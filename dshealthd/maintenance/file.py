"""The files in `path.state` that say that this node is in maintenance, one for each source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dshealthd.core import documents, schema

FILES = {"operator": "maintenance.json", "slurm": "maintenance-slurm.json"}
"""The file of each source: a person with `dshealthd maintenance`, and Slurm's drain or MAINT."""
LIMIT = 4096
"""Most bytes of a file that are read; a genuine one has some 200."""
MAX_REASON = 80
"""Characters of a reason, which becomes a label."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """One source's statement that the node is in maintenance."""

    begin: Annotated[float, schema.UNIX_TIME]
    """Unix time in seconds."""
    end: Annotated[float, schema.UNIX_TIME]
    """Unix time in seconds at which maintenance ends by itself."""
    reason: Annotated[str, schema.String(MAX_REASON)]

    def encode(self) -> bytes:
        """Return the content of the file for this maintenance."""
        return documents.dumps(self).encode() + b"\n"


def parse(text: str | bytes) -> Maintenance:
    """Return the maintenance in a file's text. Raises SchemaError, which says what is wrong."""
    found: Maintenance = schema.of(Maintenance).read(schema.document(text), "the file")
    return found
