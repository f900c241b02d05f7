"""Absences of members in maintenance: this node, if its collector says so, and those that say so.

A node in maintenance tells every member until when, once, and whenever that changes. Until then the
others neither call nor accuse it, also while its agent is gone. A member's word is about itself
alone, and is forgotten as soon as that member begins a round.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dshealthd.collectors import maintenance
from dshealthd.core.collector import gauge
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.contract import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dshealthd.core.collector import Sample
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.probe.rounds.remote_store import Peers

log = logging.getLogger(__name__)

MAINTENANCE = "maintenance"
"""The reason of a round that a member in maintenance declines, or is left out of."""
LOOK = 1.0
"""Seconds between two looks whether there is something to tell: the node may go down soon."""
TELLING = 2.0
"""Seconds for a member to take it."""
AT_ONCE = 16
"""Members that are told at a time."""
TRIES = 3
"""Times that a member is told that does not answer."""
LONGEST = 31 * 86400.0
"""Seconds for which a member's word counts at most."""
ABSENT = gauge(
    "dshealthd_probe_members_in_maintenance",
    "Members that have told this agent that they are in maintenance, and are left out of rounds.",
)
METRICS = (ABSENT,)


class Absences:
    """Who is in maintenance."""

    def __init__(self, snapshot: Snapshot, wall: Callable[[], float]) -> None:
        """Ask the collector `maintenance` of this node's own."""
        self._snapshot = snapshot
        self._wall = wall
        self._ends: dict[str, float] = {}
        self._told: dict[str, float] = {}
        """The end that each member has taken from this node."""

    def own_end(self) -> float:
        """Return when this node's own maintenance ends, 0 where it is in none."""
        try:
            latest = self._snapshot[maintenance.MaintenanceCollector.name]
        except KeyError:  # the collector is turned off
            return 0.0
        ends = [s.value for s in latest.result.samples if s.metric is maintenance.END]
        return ends[0] if ends and ends[0] > self._wall() else 0.0

    def absent(self, name: str) -> bool:
        """Whether a member has said that it is absent, in maintenance, now."""
        end = self._ends.get(name)
        if end is not None and end <= self._wall():
            del self._ends[name]
        return name in self._ends

    def hear(self, name: str, end: float) -> None:
        """Take a member's word about its absence; an end that has passed ends it."""
        if end > self._wall():
            self._ends[name] = min(end, self._wall() + LONGEST)
        else:
            self._ends.pop(name, None)

    async def answer(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer the call of a member that tells of its maintenance."""
        self.hear(sender, body["end"])
        return {}

    def forget(self, names: Iterable[str]) -> None:
        """Drop absences of members other than `names`."""
        kept = set(names)
        for known in (self._ends, self._told):
            for name in known.keys() - kept:
                del known[name]

    def samples(self) -> Iterator[Sample]:
        """Yield how many members are absent."""
        yield ABSENT(float(sum(map(self.absent, list(self._ends)))))

    async def keep_telling(self, peers: Peers, others: Callable[[], Iterable[str]]) -> None:
        """Tell the other members of this node's maintenance, and of its end; for ever."""
        failed: dict[str, int] = {}
        told = 0.0
        places = asyncio.Semaphore(AT_ONCE)
        while True:
            end = self.own_end()
            if end != told:
                failed.clear()
                told = end
            due = [
                name
                for name in others()
                if self._told.get(name, 0.0) != end and failed.get(name, 0) < TRIES
            ]
            found = await asyncio.gather(*(self._tell(peers, name, end, places) for name in due))
            for name, taken in zip(due, found, strict=True):
                if not taken:
                    failed[name] = failed.get(name, 0) + 1
            await asyncio.sleep(LOOK)

    async def _tell(self, peers: Peers, name: str, end: float, places: asyncio.Semaphore) -> bool:
        async with places:
            try:
                await peers.call(name, "absent", {"end": end}, TELLING)
            except PeerError as error:
                log.debug(
                    "probe: %s does not take that this node is in maintenance: %s", name, error
                )
                if error.outcome is not Outcome.FAILED:  # an agent that knows no such call
                    return False
            self._told[name] = end
            return True
