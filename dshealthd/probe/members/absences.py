"""Members in maintenance: this node, by its own collector, and the others, by their announcements.

A node in maintenance announces the end time to every member, and again whenever that changes.
Until then the others neither call nor accuse it, even while its agent is gone. A member can
announce only its own absence, and the announcement lapses once that member leads a scheduled round.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dshealthd.collectors import maintenance
from dshealthd.probe.peers.protocol import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dshealthd.core.snapshot import Snapshot
    from dshealthd.probe.peers.client import PeerClient

log = logging.getLogger(__name__)

MAINTENANCE = "maintenance"
"""The reason of a round that a member in maintenance declines or is left out of."""
CHECK_INTERVAL = 1.0
"""Seconds between checks for something to announce; short, as the node may go down soon."""
ANNOUNCEMENT = 2.0
"""Timeout in seconds of an announcement to one member."""
AT_ONCE = 16
"""Concurrent announcements."""
MOST = 256
"""Announcements between two checks: a large fleet takes several."""
TRIES = 3
"""Attempts to notify a member that does not answer."""
LONGEST = 31 * 86400.0
"""Maximum seconds for which an announcement counts."""


class Absences:
    """The members in maintenance."""

    def __init__(self, snapshot: Snapshot, wall: Callable[[], float]) -> None:
        """Take this node's own maintenance from the collector `maintenance` in `snapshot`."""
        self._snapshot = snapshot
        self._wall = wall
        self._ends: dict[str, float] = {}
        self._acknowledged: dict[str, float] = {}
        """The end of this node's maintenance that each member has acknowledged, unless it is over.
        """

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

    def record(self, name: str, end: float) -> None:
        """Record a member's announcement; an end in the past means that its absence is over."""
        if end > self._wall():
            self._ends[name] = min(end, self._wall() + LONGEST)
        else:
            self._ends.pop(name, None)

    async def answer(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer the call by which a member announces its maintenance."""
        self.record(sender, body["end"])
        return {}

    def forget(self, names: Iterable[str]) -> None:
        """Drop the absences of members that are not in `names`."""
        kept = set(names)
        for known in (self._ends, self._acknowledged):
            for name in known.keys() - kept:
                del known[name]

    async def keep_announcing(self, peers: PeerClient, others: Callable[[], Iterable[str]]) -> None:
        """Announce this node's maintenance and its end to the other members, until cancelled."""
        failed: dict[str, int] = {}
        announced = 0.0
        slots = asyncio.Semaphore(AT_ONCE)
        while True:
            end = self.own_end()
            if end != announced:
                failed.clear()
                announced = end
            concerned = {*others(), *self._acknowledged} if end else self._acknowledged.keys()
            due = [
                name
                for name in concerned
                if self._acknowledged.get(name, 0.0) != end and failed.get(name, 0) < TRIES
            ][:MOST]
            found = await asyncio.gather(*(self._announce(peers, name, end, slots) for name in due))
            for name, done in zip(due, found, strict=True):
                if not done:
                    failed[name] = failed.get(name, 0) + 1
            await asyncio.sleep(CHECK_INTERVAL)

    async def _announce(
        self, peers: PeerClient, name: str, end: float, slots: asyncio.Semaphore
    ) -> bool:
        async with slots:
            try:
                await peers.call(name, "absent", {"end": end}, ANNOUNCEMENT)
            except PeerError as error:
                log.debug("probe: cannot announce this node's maintenance to %s: %s", name, error)
                return False
            if end:
                self._acknowledged[name] = end
            else:
                self._acknowledged.pop(name, None)
            return True
