"""Immediate light rounds with the other nodes of a hung job.

If all ranks of a job on this node wait and nothing here explains it, the path to the job's other
nodes is suspect. The schedule may take many epochs to reach them, so this node meets them at once
in light rounds: echoes between two agents that touch no GPU. It finds those nodes by querying the
members that follow it in the list: launchers give a job consecutive nodes, and each node of the job
does the same, so neighbors in the job meet. It also meets a member that does not answer: the path
to it may be at fault.

Their answers also tell whether each rank of the job stands still, which no Prometheus may see alone
where the nodes of a job are spread over several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.probe.peers.messages import summary_text
from dshealthd.probe.peers.protocol import PeerError

if TYPE_CHECKING:
    from dshealthd.jobs.hangs.judge import Standstill

ROUNDS = counter(
    "dshealthd_probe_hang_rounds_total",
    "Immediate light rounds with the other nodes of a hung job; at most 4 a minute.",
)
STANDING = gauge(
    "dshealthd_job_standing_ranks",
    "Stalled ranks of a job that is hung here without a known cause, on this node and on "
    "members queried in the last minute; absent while any of them sees the job at work.",
    "training_job",
)

_NOT_AT_WORK = frozenset({HangClass.WAITING, HangClass.IDLE, HangClass.COLLECTIVE})
PARTNERS = 4
"""Maximum nodes that this node meets for one hang."""
SILENT = 2
"""Maximum unanswering members among them: most of those are down for another reason."""
ASKED = 32
"""Members queried for their jobs, in list order starting after this node, and as many more as the
job has nodes if its ranks are spread evenly; each answers in a millisecond.
"""
MOST_ASKED = 1024
"""Each node of a hung job asks the others once in GAP: from so many, each a millisecond, a node
spends 2 % of a core on answers. The size of a job is what its user says it is.
"""
AT_ONCE = 8
"""Concurrent calls."""
GAP = 60.0
"""Minimum seconds between two hangs, whatever their jobs: users can make jobs hang at will."""
_WITHOUT_CAUSE = frozenset({HangClass.WAITING, HangClass.COLLECTIVE})


@dataclass(frozen=True, slots=True)
class Neighborhood:
    """The members, and how this node reaches them."""

    me: str
    names: Callable[[], Sequence[str]]
    """All members in list order, including this node."""
    left_out: Callable[[str], bool]
    """Tells whether a member is in maintenance or already accused."""
    query: Callable[[str], Awaitable[Mapping[str, Any]]]
    """Returns the summary of a member; raises PeerError."""
    hold_round: Callable[[str], Awaitable[bool]]
    """Runs a light round with a member; tells whether it could be started."""


class HungJobs:
    """The hangs for which this node still has to meet other nodes."""

    def __init__(
        self, summary: Callable[[], Mapping[str, Any]], monotonic: Callable[[], float]
    ) -> None:
        """`summary` returns what this node reports about itself, including its jobs."""
        self._summary = summary
        self._monotonic = monotonic
        self._hung: frozenset[str] = frozenset()
        self._seen: set[str] = set()
        """Jobs whose current hang is already queued or handled."""
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        """The jobs in that queue, once each: who hangs again and again has one turn at a time."""
        self._standing: dict[str, tuple[float, int | None]] = {}
        """When members were last asked about each hang, and how many ranks then stood still; None
        if a member had some at work.
        """
        self._free_at = float("-inf")
        self._rounds = 0

    def update_hangs(self, hangs: Iterable[Standstill]) -> None:
        """Take the hangs that are confirmed now; those not given are over."""
        by_job = {hang.job: hang.reason for hang in hangs}
        self._hung = frozenset(by_job)
        self._seen &= self._hung
        for job, (at, _) in list(self._standing.items()):
            if job not in self._hung:
                del self._standing[job]
            elif self._monotonic() - at > GAP:  # ranks elsewhere fall silent later, or go on
                self._seen.discard(job)
        for job, reason in by_job.items():
            if reason in _WITHOUT_CAUSE and job not in self._seen:
                self._seen.add(job)
                if job not in self._queued:
                    self._queued.add(job)
                    self._waiting.put_nowait(job)

    async def work(self, around: Neighborhood) -> None:
        """Meet the nodes of one hung job after another, until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._free_at - self._monotonic()))
            job = await self._waiting.get()
            self._queued.discard(job)
            if job not in self._hung or self._is_all_here(job):
                continue
            self._free_at = self._monotonic() + GAP
            met = job in self._standing
            for name in await self._partners(job, around):
                if not met and await around.hold_round(name):
                    self._rounds += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the number of rounds with nodes of hung jobs."""
        yield ROUNDS(float(self._rounds))
        for job, (_, ranks) in self._standing.items():
            if ranks is not None:
                yield STANDING(ranks, job)

    def _is_all_here(self, job: str) -> bool:
        return any(
            entry["job"] == summary_text(job)
            and entry["ranks"] >= entry.get("world_size", float("inf"))
            for entry in self._summary()["jobs"]
        )

    async def _partners(self, job: str, around: Neighborhood) -> list[str]:
        """Return the members to meet for a hung job: some that do not answer, some that run it."""
        names = list(around.names())
        if around.me not in names:
            return []
        place = names.index(around.me)
        own = _entries(job, self._summary())
        nodes = next((entry.get("world_size", 0) // max(entry["ranks"], 1) for entry in own), 0)
        others = [
            name for name in (*names[place + 1 :], *names[:place]) if not around.left_out(name)
        ][: min(ASKED + nodes, MOST_ASKED)]
        places = asyncio.Semaphore(AT_ONCE)

        async def entries(name: str) -> list[Mapping[str, Any]] | None:
            async with places:
                try:
                    return _entries(job, await around.query(name))
                except PeerError:
                    return None

        found = dict(zip(others, await asyncio.gather(*map(entries, others)), strict=True))
        parts = [*own, *(entry for entries in found.values() for entry in entries or ())]
        still = all(_stands_still(entry) for entry in parts)
        ranks = sum(entry["ranks"] for entry in parts) if still else None
        self._standing[job] = self._monotonic(), ranks
        silent = [name for name, entries in found.items() if entries is None]
        partners = [name for name, entries in found.items() if entries]
        return [*silent[:SILENT], *partners][:PARTNERS]


def _entries(job: str, summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in summary["jobs"] if entry["job"] == summary_text(job)]


def _stands_still(entry: Mapping[str, Any]) -> bool:
    """Return whether a node shows no rank of a job at work."""
    return entry["state"] == "hung" or (
        entry["state"] == "stalled" and entry.get("cause") in _NOT_AT_WORK
    )
