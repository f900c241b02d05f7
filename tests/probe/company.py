"""Several nodes in one event loop.

Real rounds over the real peer API on 127.0.0.N, with workers that are plain fakes or real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dshealthd.linux import starvation
from dshealthd.probe.members.membership import Member, Membership
from dshealthd.probe.node import ThisNode
from dshealthd.probe.observation import (
    Backend,
    Observation,
    Outcome,
    PeerReport,
    RoundKind,
    RoundPlan,
    Stage,
    Timing,
)
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers import client
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.server import PeerServer
from dshealthd.probe.rounds import leader, light, member
from dshealthd.probe.rounds.active_round import RoundReport
from dshealthd.probe.rounds.round import Rounds
from dshealthd.probe.workers.job import RankResult, WorkerJob
from dshealthd.probe.workers.store import StoreError, StoreHandler
from tests.probe.peering import KEY, PATIENT, secret

EPOCH = 1000
Deadlines = tuple[tuple[ModuleType, tuple[str, ...]], ...]
ANSWERS: Deadlines = (
    (client, ("ANSWER",)),
    (leader, ("PRESENCE",)),
    (member, ("LIGHT_ROUND",)),
    (light, ("PATIENCE",)),
    (starvation, ("LAG",)),
)
"""How long an agent waits for another one that is there, and may be slow as this machine is."""
SHARE: Deadlines = ((leader, ("SHARE",)),)
"""How long a root waits for what the member's workers gave."""
NAMES = tuple(f"127.0.0.{number}" for number in range(11, 19))


def give_time(patch: pytest.MonkeyPatch, deadlines: Deadlines = ANSWERS) -> None:
    """Have agents wait for each other for as long as this machine may need."""
    for module, names in deadlines:
        for name in names:
            patch.setattr(module, name, PATIENT)


class FakeWorkers:
    """Workers that meet in the store and then do what they are told."""

    def __init__(self) -> None:
        self.runs = 0
        self.outcome, self.stage, self.reason = Outcome.OK, Stage.DONE, ""
        self.counters = 10, 10
        self.seconds = 0.001
        self.silent = self.absent = False
        """Meet the others, or do not, and never come back."""
        self.deadline = PATIENT

    async def run(
        self, job: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> list[RankResult]:
        """Meet the others and return what is set."""
        self.runs += 1
        (rank_spec,) = job.rank_specs
        progress(rank_spec.rank, Stage.STORE)
        outcome, stage, reason, counters = self.outcome, self.stage, self.reason, self.counters
        if self.absent:
            await asyncio.sleep(3600)
        try:
            await store("set", f"here/{rank_spec.rank}", b"1", self.deadline)
            for rank in range(job.world_size):
                assert await store("get", f"here/{rank}", None, self.deadline) == b"1"
        except (TimeoutError, StoreError):
            outcome, stage, reason, counters = Outcome.HUNG, Stage.STORE, "deadline", (0, 0)
        if self.silent:
            await asyncio.sleep(3600)
        timings = (
            tuple(
                Timing("all_reduce", size, self.seconds, size / self.seconds)
                for size, _ in job.steps
            )
            if outcome is Outcome.OK
            else ()
        )
        entered, left = counters
        return [
            RankResult(
                rank=rank_spec.rank,
                outcome=outcome,
                stage=stage,
                reason=reason,
                timings=timings,
                entered=entered,
                left=left,
            )
        ]


class FakeNode(ThisNode):
    """A node as rounds see it."""

    def __init__(
        self,
        name: str,
        names: tuple[str, ...],
        peers: PeerClient,
        workers: Any,
        waited: Callable[[], float | None],
    ) -> None:
        self.name = self.address = name
        self.interface = "lo"
        self.adapters: tuple[str, ...] = ()
        self.names = names
        self.reason = ""
        self.clock_off = 0.0
        self.peers, self.workers = peers, workers
        self.monotonic, self.waited = time.monotonic, waited
        self.wall = lambda: time.time() + self.clock_off

    def membership(self) -> Membership:
        """Return the members."""
        return Membership(tuple(Member(name, 8) for name in sorted(self.names)), {}, "test")

    def epoch(self) -> int:
        """Return the epoch, with ten seconds each."""
        return EPOCH + int(self.clock_off // 10)

    async def objection(self, _plan: RoundPlan) -> str:
        """Return why the GPUs are not to be used."""
        return self.reason

    async def run(
        self, work: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> tuple[RankResult, ...]:
        """Run the workers, beside which no job starts."""
        workers: Any = self.workers
        return tuple(await workers.run(work, store, progress))

    def report(self) -> PeerReport:
        """Return what it tells of itself."""
        return PeerReport(1.0, pairs={self.name: 1.0})


class Companion:
    """One node with everything that belongs to it."""

    def __init__(
        self,
        name: str,
        names: tuple[str, ...],
        options: PeerOptions,
        ports: dict[str, int],
        workers: Any,
        waited: Callable[[], float | None] = lambda: 0.0,
    ) -> None:
        self.name = name
        self.reports: list[RoundReport] = []
        self.client = PeerClient(options, name, lambda peer: (peer, ports[peer]))
        self.node = FakeNode(name, names, self.client, workers, waited)
        self.rounds = Rounds(self.node, self.reports.append)
        self.server = PeerServer(options, name, lambda: self.node.names, self.rounds.handlers())
        self._ports = ports

    @property
    def fake(self) -> FakeWorkers:
        """The workers, where they are fakes."""
        workers: Any = self.node.workers
        assert isinstance(workers, FakeWorkers)
        return workers

    @property
    def observation(self) -> Observation:
        """The one round it had."""
        (report,) = self.reports
        return report.observation

    def plan(self, other: str, epoch: int = EPOCH) -> RoundPlan:
        """Return a round that this node leads."""
        return RoundPlan(
            epoch=epoch,
            kind=RoundKind.PAIR,
            backend=Backend.GLOO,
            members=(self.name, other),
            digest=self.node.membership().digest,
            steps=((8, 3), (4096, 3)),
        )

    async def open(self) -> None:
        """Listen."""
        await self.server.start()
        self._ports[self.name] = self.server.port

    async def close(self) -> None:
        """End as an agent does that is stopped."""
        await self.rounds.close()
        await self.server.close()
        await self.client.close()


@contextlib.asynccontextmanager
async def company(
    directory: Path,
    count: int,
    *,
    workers: Callable[[str], Any] = lambda _: FakeWorkers(),
    silent: bool = False,
    waited: Callable[[str], float] = lambda _: 0.0,
) -> AsyncIterator[list[Companion]]:
    """Run so many nodes.

    `waited` gives for how many seconds a node has waited for a CPU by now: for none as it is. All
    have time to answer. Unless one is `silent`, they have it for a share too.
    """
    names = NAMES[:count]
    ports: dict[str, int] = {}
    companions: list[Companion] = []
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        give_time(patch, ANSWERS if silent else ANSWERS + SHARE)
        patch.setattr(leader, "FIRST", 0.2)
        for name in names:
            companion = Companion(
                name,
                names,
                PeerOptions(
                    listen_address=f"{name}:0", key_file=secret(directory, f"key-{name}", KEY)
                ),
                ports,
                workers(name),
                functools.partial(waited, name),
            )
            await companion.open()
            stack.push_async_callback(companion.close)
            companions.append(companion)
        yield companions


async def all_have(companions: list[Companion], count: int = 1, seconds: float = PATIENT) -> None:
    """Wait until each of these nodes has had so many rounds."""
    async with asyncio.timeout(seconds):
        while not all(len(companion.reports) >= count for companion in companions):
            await asyncio.sleep(0.01)


def ended(observation: Observation, outcome: Outcome, **fields: object) -> None:
    """Require that a round ended so, with these fields in its observation."""
    found = {name: getattr(observation, name) for name in fields}
    assert (observation.outcome, found) == (outcome, fields)


def same(companions: list[Companion]) -> Observation:
    """Return the observation that both nodes share: all but the time at which each ended its round,
    and what the other reported.
    """
    pair = sorted(companions, key=lambda one: one.reports[0].led, reverse=True)
    root, member = (replace(one.observation, at=0.0, told=None) for one in pair)
    assert root == member
    return root
