"""This node as rounds see it: name, members, peers, clock, GPUs, workers, and its own report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.state_writer import StateFile
from dshealthd.probe.hung_jobs import HungJobs
from dshealthd.probe.members.absences import Absences
from dshealthd.probe.members.local_membership import LocalMembership
from dshealthd.probe.members.schedule import epoch_at
from dshealthd.probe.metrics import RoundMetrics
from dshealthd.probe.observation import ON_DEMAND, Outcome, PeerReport, RoundPlan, Stage
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.policy import BUSY, GpuOccupancy, Policy
from dshealthd.probe.rounds.plan import job
from dshealthd.probe.workers.job import RankResult, WorkerJob
from dshealthd.probe.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.peers.client import PeerClient
    from dshealthd.probe.rounds.active_round import ActiveRound
    from dshealthd.probe.verdicts.detector import Detector
    from dshealthd.probe.workers.store import StoreHandler

NO_PYTHON = "no_python"
WARMING_UP = "warming_up"
NO_CUDA = "no_cuda"
"""The node has GPUs that its environment's torch cannot use: it is built without CUDA, the driver
is too old, or CUDA sees fewer of them.
"""
GPUS_DIFFER = "gpus_differ"
"""The node has fewer GPUs than the round needs."""
PREPARATION = 60.0
"""Timeout in seconds for importing torch from a cold disk."""
WATCH = 2.0
"""Seconds between looks for a job that has started beside workers: most rounds are over by then,
one that hangs takes up to a minute. A rank imports torch for longer before it uses a GPU.
"""


@dataclass(frozen=True, slots=True)
class ProbeState:
    """What the slots of this node share with those after a change of its name."""

    options: ProbeOptions
    local_membership: LocalMembership
    gpus: GpuOccupancy
    policy: Policy
    worker_pool: WorkerPool | None
    """None if all rounds are light."""
    absences: Absences
    hung_jobs: HungJobs
    metrics: RoundMetrics
    again: asyncio.Event
    """Set to have the members reread."""
    file: StateFile
    """The baselines of earlier runs."""
    summary: Callable[[], dict[str, Any]]
    """Returns what this node reports about itself; see `fleet.summary`."""
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    waited: Callable[[], float | None]
    """Returns the seconds that this agent has waited for a CPU."""


class ThisNode:
    """This node, with its GPUs, its workers, and the other nodes' agents."""

    def __init__(
        self, state: ProbeState, detector: Detector, address: tuple[str, str], peers: PeerClient
    ) -> None:
        """`address` is this node's numeric address for the workers, and its interface."""
        self.name = state.local_membership.me
        self.address, self.interface = address
        self.adapters = state.options.worker.adapters
        self.peers, self.workers = peers, state.worker_pool
        self.monotonic, self.wall, self.waited = state.monotonic, state.wall, state.waited
        self._state, self._detector = state, detector
        self._preparing: asyncio.Task[str] | None = None
        self._trouble = ""

    def membership(self) -> Membership:
        """Return the members as this node knows them now."""
        return self._state.local_membership.membership

    def epoch(self) -> int:
        """Return the current epoch number by this node's clock."""
        return epoch_at(self._state.wall(), self._state.options.period)

    def report(self) -> PeerReport:
        """Return what this node's detector reports to peers."""
        return self._detector.report()

    async def objection(self, plan: RoundPlan) -> str:
        """Return why this node may not run another node's plan now, as a slug, or empty."""
        if reason := await self.obstacle(scheduled=plan.epoch != ON_DEMAND, asked=True):
            return reason
        return GPUS_DIFFER if plan.ranks > (self._state.gpus.count() or 1) else ""

    async def obstacle(self, *, scheduled: bool, asked: bool = False) -> str:
        """Return why this node may not take part in a round with workers now, as a slug. Empty if
        it may. If the worker pool is not prepared yet, start preparing it.
        """
        worker_pool = self.workers
        if worker_pool is None:
            return NO_PYTHON
        policy = self._state.policy
        # Busy, too: what was seen there may have been this node's own workers.
        if policy.objection(scheduled=scheduled, asked=asked) in {"", BUSY}:
            await self._state.gpus.refresh()
        if reason := policy.objection(scheduled=scheduled, asked=asked):
            return reason
        if not worker_pool.ready:
            return self._prepare(worker_pool)
        return NO_CUDA if worker_pool.no_gpus(self._state.gpus.count()) else ""

    async def query(
        self, name: str, method: str, body: Mapping[str, Any], deadline: float | None = None
    ) -> dict[str, Any] | PeerError:
        """Return a peer's answer in an active round, or the error if there is none."""
        try:
            return await self.peers.call(name, method, body, deadline)
        except PeerError as error:
            return error

    async def absent(self, name: str, deadline: float) -> PeerError | None:
        """Return why a member's agent does not answer an echo, None if it does."""
        answer = await self.query(name, "echo", {"clock": self.wall(), "payload": b""}, deadline)
        return answer if isinstance(answer, PeerError) else None

    async def work(self, active: ActiveRound, store: StoreHandler) -> tuple[RankResult, ...]:
        """Run this node's workers of the active round, which meet in `store`."""

        def progress(_rank: int, stage: Stage) -> None:
            active.stage = stage

        work = job(
            active.plan,
            self.name,
            address=self.address,
            interface=self.interface,
            adapters=self.adapters,
        )
        return await self.run(work, store, progress)

    async def run(
        self, work: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> tuple[RankResult, ...]:
        """Run this node's workers, and end them if a job starts meanwhile: their results say so."""
        assert self.workers is not None  # noqa: S101 - a node without workers is never ready
        running = asyncio.ensure_future(self.workers.run(work, store, progress))
        try:
            while not (await asyncio.wait({running}, timeout=WATCH))[0]:
                if self._state.options.policy.gpus == "idle" and await self._state.gpus.taken():
                    return tuple(
                        RankResult(
                            rank=spec.rank,
                            outcome=Outcome.DECLINED,
                            stage=Stage.IMPORT,
                            reason=BUSY,
                            part=spec.part,
                        )
                        for spec in work.rank_specs
                    )
            return tuple(running.result())
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def close(self) -> None:
        """Cancel preparation of the workers if it is in progress."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)

    def _prepare(self, worker_pool: WorkerPool) -> str:
        if self._preparing is not None and self._preparing.done():
            self._trouble = self._preparing.result()
            self._preparing = None
        if self._preparing is None:
            self._preparing = asyncio.create_task(
                worker_pool.prepare(PREPARATION), name="importing torch"
            )
        return self._trouble or WARMING_UP
