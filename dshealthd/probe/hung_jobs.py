"""Hung jobs' other nodes, which this one meets in light rounds at once.

Where all ranks of a job on this node wait and nothing here explains it, the way to the job's other
nodes is suspect, and the schedule may take many epochs until it comes to them. A light round is an
echo between two agents: no GPU is touched. Which nodes those are, the members next to this one in
the list say: launchers give a job nodes that follow each other, and each of its nodes looks, so
that neighbours in the job meet. A member that does not answer is met too: its way may be the fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.collector import counter
from dshealthd.jobs.hangs.hang import HangClass
from dshealthd.probe.peers.contract import PeerError
from dshealthd.probe.peers.messages import summary_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.core.collector import Sample
    from dshealthd.jobs.hangs.hang import Hang

ROUNDS = counter(
    "dshealthd_probe_hang_rounds_total",
    "Light rounds with the other nodes of a hung job that were begun at once; at most 4 a minute.",
)
METRICS = (ROUNDS,)

PARTNERS = 4
"""Nodes of a job that this node meets."""
SILENT = 2
"""Of these, members that do not answer: most of them are down for another reason."""
ASKED = 32
"""Members that are asked for their jobs, in the order of the list from this node on."""
AT_ONCE = 8
"""Calls at a time."""
ANSWER = 2.0
"""Seconds for an answer, which takes some milliseconds."""
GAP = 60.0
"""Seconds from one hang to the next, whichever job has it: a user can have jobs hang at will."""
MAX_WAITING = 4
"""Hangs that wait for their turn; those of more jobs at once have one cause."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """The members as a node that is set up sees them."""

    me: str
    names: Callable[[], Sequence[str]]
    """All members in their order, this node among them."""
    left_out: Callable[[str], bool]
    """Whether a member is in maintenance, or accused already."""
    ask: Callable[[str], Awaitable[Mapping[str, Any]]]
    """Returns the summary of a member; raises PeerError."""
    meet: Callable[[str], Awaitable[bool]]
    """Has a light round with a member; whether it could be begun."""


class HungJobs:
    """The hangs for which this node is to meet others."""

    def __init__(
        self, summary: Callable[[], Mapping[str, Any]], monotonic: Callable[[], float]
    ) -> None:
        """`summary` is what this node tells of itself, its jobs among it."""
        self._summary = summary
        self._monotonic = monotonic
        self._hung: frozenset[str] = frozenset()
        self._seen: set[str] = set()
        """Jobs of whose present hang this node has taken note."""
        self._waiting: list[str] = []
        self._added = asyncio.Event()
        self._free_at = float("-inf")
        self._rounds = 0

    def see(self, hangs: Iterable[Hang]) -> None:
        """Take note of the hung jobs that are confirmed now: those that are not given are over."""
        by_job = {hang.job: hang.reason for hang in hangs}
        self._hung = frozenset(by_job)
        self._seen &= self._hung
        for job, reason in sorted(by_job.items()):
            room = len(self._waiting) < MAX_WAITING
            if reason is HangClass.WAITING and job not in self._seen and room:
                self._seen.add(job)
                self._waiting.append(job)
                self._added.set()

    async def work(self, around: Neighbourhood) -> None:
        """Meet the nodes of one hung job after the other, until cancelled."""
        while True:
            while not self._waiting:
                self._added.clear()
                await self._added.wait()
            await asyncio.sleep(max(0.0, self._free_at - self._monotonic()))
            job = self._waiting.pop(0)
            if job not in self._hung or self._is_all_here(job):
                continue
            self._free_at = self._monotonic() + GAP
            for name in await self._partners(job, around):
                if await around.meet(name):
                    self._rounds += 1

    def samples(self) -> Iterator[Sample]:
        """Yield how many rounds there were with nodes of hung jobs."""
        yield ROUNDS(float(self._rounds))

    def _is_all_here(self, job: str) -> bool:
        """Tell whether all ranks of a hung job are on this node."""
        return any(
            entry["job"] == summary_text(job)
            and entry["ranks"] >= entry.get("world_size", float("inf"))
            for entry in self._summary()["jobs"]
        )

    async def _partners(self, job: str, around: Neighbourhood) -> list[str]:
        """Return members to meet for a hung job: some that are silent, and some that have it."""
        names = list(around.names())
        if around.me not in names:
            return []
        place = names.index(around.me)
        others = [
            name for name in (*names[place + 1 :], *names[:place]) if not around.left_out(name)
        ][:ASKED]
        places = asyncio.Semaphore(AT_ONCE)

        async def has_job(name: str) -> bool | None:
            async with places:
                try:
                    summary = await around.ask(name)
                except PeerError:
                    return None
            return any(entry["job"] == summary_text(job) for entry in summary["jobs"])

        found = await asyncio.gather(*map(has_job, others))
        silent = [name for name, has in zip(others, found, strict=True) if has is None]
        partners = [name for name, has in zip(others, found, strict=True) if has]
        return [*silent[:SILENT], *partners][:PARTNERS]
