"""This node as rounds see it: name, members, clock, GPUs, workers, and what it tells of itself."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from dshealthd.probe.members.schedule import epoch_at
from dshealthd.probe.rounds.plan import ON_DEMAND, RoundPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dshealthd.probe.members.local_membership import LocalMembership
    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.policy import GpuOccupancy, Policy
    from dshealthd.probe.rounds.conclusion import Scores
    from dshealthd.probe.verdicts.detector import Detector
    from dshealthd.probe.workers.worker_pool import WorkerPool

NO_PYTHON = "no_python"
WARMING_UP = "warming_up"
NO_CUDA = "no_cuda"
"""The node has GPUs, and the torch of its environment is built without CUDA."""
LIMITED = "rate_limited"
PREPARATION = 60.0
"""Seconds for the import of torch from a cold disk."""


class ThisNode:
    """Answers what `round.Node` asks."""

    def __init__(
        self,
        local_membership: LocalMembership,
        policy: Policy,
        gpus: GpuOccupancy,
        worker_pool: WorkerPool | None,
        detector: Detector,
        *,
        address: str,
        interface: str,
        adapters: Sequence[str],
        period: float,
        extra_per_minute: int,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.name = local_membership.me
        self.address, self.interface, self.adapters = address, interface, adapters
        self._local_membership, self._policy, self._gpus, self._worker_pool, self._detector = (
            local_membership,
            policy,
            gpus,
            worker_pool,
            detector,
        )
        self._period = period
        self._extra_per_minute = extra_per_minute
        self._monotonic, self._wall = monotonic, wall
        self._extra: deque[float] = deque()
        self._preparing: asyncio.Task[str] | None = None
        self._trouble = ""

    def membership(self) -> Membership:
        """Return the members as this node believes them to be now."""
        return self._local_membership.membership

    def epoch(self) -> int:
        """Return the number of the epoch that it is for this node, by its clock."""
        return epoch_at(self._wall(), self._period)

    def gpus(self) -> int:
        """Return how many GPUs this node has for a round."""
        return self._gpus.count()

    def scores(self) -> Scores:
        """Return the scores that this node's judge tells peers."""
        return self._detector.scores()

    def objection(self, plan: RoundPlan) -> str:
        """Return why no workers of this node may run for another node's plan now."""
        on_demand = plan.epoch == ON_DEMAND
        reason = self.obstacle(scheduled=not on_demand, asked=on_demand)
        if reason or not on_demand:
            return reason
        now = self._monotonic()
        while self._extra and now - self._extra[0] > 60.0:  # noqa: PLR2004 - a minute
            self._extra.popleft()
        if len(self._extra) >= self._extra_per_minute:
            return LIMITED
        self._extra.append(now)
        return ""

    def obstacle(self, *, scheduled: bool, asked: bool = False) -> str:
        """Return why this node may not take part in a round with workers now, as a slug.

        Empty if it may. Where the pool only has to be prepared, that is begun.
        """
        if self._worker_pool is None:
            return NO_PYTHON
        reason = self._policy.objection(scheduled=scheduled, asked=asked)
        if reason:
            return reason
        if not self._worker_pool.ready:
            return self._prepare(self._worker_pool)
        return NO_CUDA if self._gpus.count() and not self._worker_pool.about.get("cuda") else ""

    async def close(self) -> None:
        """Give up a preparation of this node's workers in progress."""
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
