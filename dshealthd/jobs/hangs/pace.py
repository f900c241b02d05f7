"""The pace of ranks, saved so that an agent that starts again knows what is usual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core import documents, schema
from dshealthd.core.host import MAX_FILE, Host, read
from dshealthd.core.state_writer import StateFile
from dshealthd.jobs.hangs.watch import SavedRank
from dshealthd.jobs.heartbeats.reader import MAX_SENDERS

if TYPE_CHECKING:
    from pathlib import Path

SAVE = 10.0
"""Seconds between two writes while there are ranks."""


@dataclass(slots=True)
class SavedRanks:
    """The usual silences of ranks, and the boot that these belong to."""

    boot_id: str
    ranks: list[SavedRank]


class Pace:
    """The file `job_hang.json` of the agent's state directory."""

    def __init__(self, directory: Path, host: Host) -> None:
        """Prepare without reading the file; OSError if the boot id cannot be read."""
        self._boot_id = read(host.proc("sys/kernel/random/boot_id")).strip()
        self._file = StateFile(directory, "job_hang", MAX_FILE)
        self._saved = 0.0
        self._kept = True
        """Whether the file may hold ranks."""

    async def load(self) -> list[SavedRank]:
        """Return the ranks' baselines that this boot saved; OSError, SchemaError."""
        if (document := await self._file.load()) is None:
            return []
        found: SavedRanks = schema.of(SavedRanks).read(document, self._file.place)
        return found.ranks if found.boot_id == self._boot_id else []

    def keep(self, ranks: list[SavedRank], now: float, *, at_once: bool = False) -> None:
        """Save the ranks' baselines in the background, if it is time; `now` is monotonic."""
        if (now - self._saved < SAVE and not at_once) or not (ranks or self._kept):
            return
        self._saved, self._kept = now, bool(ranks)
        saved = schema.of(SavedRanks).write(SavedRanks(self._boot_id, ranks[:MAX_SENDERS]))
        self._file.save(documents.dumps(saved, separators=documents.COMPACT))
