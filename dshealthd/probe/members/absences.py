"""Members in maintenance: this node, by its own collector, and the others, by their announcements.

A node in maintenance announces the end time to every member, and again when that changes.
Until then the others neither call nor accuse it, even while its agent is gone. A member can
announce only its own absence, and the announcement lapses once that member leads a scheduled round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dshealthd.collectors import maintenance
from dshealthd.core import documents, schema
from dshealthd.probe.peers.protocol import PeerError

if TYPE_CHECKING:
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.core.state_writer import StateFile
    from dshealthd.probe.peers.client import PeerClient

log = logging.getLogger(__name__)

MAINTENANCE = "maintenance"
"""The reason of a round that a member in maintenance declines or is left out of."""
CHECK_INTERVAL = 1.0
"""Seconds between checks for something to announce; short, as the node may go down soon."""
AT_ONCE = 16
"""Concurrent announcements."""
TRIES = 3
"""Attempts to notify a member that does not answer."""
LONGEST = 31 * 86400.0
"""Maximum seconds for which an announcement counts."""


class Absences:
    """The members in maintenance."""

    def __init__(self, snapshot: Snapshot, wall: Callable[[], float], file: StateFile) -> None:
        """Take this node's own maintenance from the collector `maintenance` in `snapshot`. `file`
        keeps the others' announcements: who is down cannot repeat them to an agent that restarts.
        """
        self._snapshot = snapshot
        self._wall = wall
        self._file = file
        self._ends: dict[str, float] = {}

    async def restore(self) -> None:
        """Read the announcements that an earlier agent has recorded."""
        try:
            if (document := await self._file.load()) is not None:
                with schema.reading("the file of absences"):
                    for name, end in document["ends"].items():
                        self.record(name, float(end))
        except (schema.SchemaError, OSError) as error:
            log.warning("probe: earlier announcements of maintenance are lost: %s", error)

    def own_end(self) -> float:
        """Return the Unix time at which this node's maintenance ends, 0 outside maintenance."""
        try:
            latest = self._snapshot[maintenance.MaintenanceCollector.name]
        except KeyError:  # the collector is turned off
            return 0.0
        ends = [s.value for s in latest.result.samples if s.metric is maintenance.END]
        return ends[0] if ends and ends[0] > self._wall() else 0.0

    def absent(self, name: str) -> bool:
        """Return whether a member has announced that it is in maintenance now."""
        end = self._ends.get(name)
        if end is not None and end <= self._wall():
            del self._ends[name]
        return name in self._ends

    def names(self) -> list[str]:
        """Return the members that have announced that they are in maintenance now."""
        return [name for name in list(self._ends) if self.absent(name)]

    def record(self, name: str, end: float) -> None:
        """Record a member's announcement; an end in the past means that its absence is over."""
        before = self._ends.get(name)
        if end > self._wall():
            self._ends[name] = min(end, self._wall() + LONGEST)
        else:
            self._ends.pop(name, None)
        if self._ends.get(name) != before:
            self._file.save(documents.dumps({"ends": self._ends}))

    async def answer(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer the call by which a member announces its maintenance."""
        self.record(sender, body["end"])
        return {}

    def forget(self, names: Iterable[str]) -> None:
        """Drop the absences of members that are not in `names`."""
        for name in self._ends.keys() - set(names):
            del self._ends[name]

    async def keep_announcing(self, peers: PeerClient, others: Callable[[], Iterable[str]]) -> None:
        """Announce this node's maintenance and its end to the other members, until cancelled."""

        async def announce(names: Iterator[str], end: float, failed: list[str]) -> None:
            for name in names:
                try:
                    await peers.call(name, "absent", {"end": end})
                except PeerError as error:
                    log.debug("probe: cannot announce maintenance to %s: %s", name, error)
                    failed.append(name)

        announced, due, tries = 0.0, list[str](), 0
        while True:
            if (end := self.own_end()) != announced:
                announced, due, tries = end, list(others()), TRIES
            if due and tries:
                names, due, tries = iter(due), [], tries - 1
                await asyncio.gather(*(announce(names, end, due) for _ in range(AT_ONCE)))
            await asyncio.sleep(CHECK_INTERVAL)
