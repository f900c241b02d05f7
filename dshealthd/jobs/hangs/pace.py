"""The pace of ranks, saved so that an agent that starts again knows what is usual."""

from __future__ import annotations

import errno
import functools
import logging
from typing import TYPE_CHECKING, Any

from dshealthd.core import background, schema, state_file
from dshealthd.core.counter_file import CounterFile
from dshealthd.core.host import read

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.core.host import Host


log = logging.getLogger(__name__)
MAX_RANKS = 256
"""As many as can send heartbeats at a time."""
SAVE = 10.0
"""Seconds between two writes while there are ranks."""
DEADLINE = 2.0
"""Deadline in seconds for reading the file, which takes some 20 ms."""
_LIMIT = 1 << 20
"""Most bytes of the file: 4 KiB for each of MAX_RANKS."""
_PROCESS = dict.fromkeys(("pid", "start", "user"), schema.Integer())


class Pace:
    """The file `job_hang.json` of the agent's state directory."""

    def __init__(self, directory: Path, host: Host) -> None:
        """Prepare without reading the file; OSError if the boot id cannot be read."""
        boot_id = read(host.proc("sys/kernel/random/boot_id")).strip()
        self._content = ""
        self._file = CounterFile(directory, "job_hang", boot_id, lambda _place: self._content)
        self._saved = 0.0
        self._kept = True
        """Whether the file may hold ranks."""

    async def load(self) -> list[dict[str, Any]]:
        """Return the saved rows of the ranks; OSError, SchemaError."""
        look = functools.partial(state_file.read_in_child, self._file.place, _LIMIT)
        try:
            content = await background.call(look, "state of job_hang", DEADLINE, OSError)
        except FileNotFoundError:
            return []
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, "the disk hangs", self._file.place) from error
        self._content = content.decode(errors="replace")
        with schema.reading(self._file.place):
            document = self._file.load()
            rows = [] if document is None else document["ranks"]
            return [
                {name: kind.read(row[name], name) for name, kind in _PROCESS.items()}
                | {name: row[name] for name in ("sent", "baseline")}
                for row in rows[:MAX_RANKS]
            ]

    def keep(self, rows: list[dict[str, Any]], now: float, *, at_once: bool = False) -> None:
        """Write the rows in the background, if it is time; `now` is monotonic."""
        if (now - self._saved < SAVE and not at_once) or not (rows or self._kept):
            return
        self._saved, self._kept = now, bool(rows)
        try:
            self._file.save({"ranks": rows[:MAX_RANKS]})
        except OSError as error:
            log.warning("the ranks' baselines are not saved: %s", error)
