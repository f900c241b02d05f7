"""An active round as one agent sees it: its state, what it needs of its node, and its report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.core.timing import time_limit
from dshealthd.linux.starvation import LoopLag
from dshealthd.probe.node import ThisNode
from dshealthd.probe.observation import Observation, Stage
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import PeerError, Rejection
from dshealthd.probe.rounds.conclusion import MemberResult, Scores
from dshealthd.probe.rounds.plan import RoundPlan, job
from dshealthd.probe.workers.store import LocalStore
from dshealthd.probe.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from dshealthd.probe.workers.job import RankResult
    from dshealthd.probe.workers.store import StoreHandler


class Decline:
    """Reasons to decline a round, besides those of the policy, which make a round light."""

    CLOCK = "clock_differs"
    MEMBERS = "members_differ"
    VERSION = "version_differs"
    TESTING = "already_testing"
    GPUS = "gpus_differ"
    ROUND = "unknown_round"
    MALFORMED = "malformed"


DISAGREEMENTS = frozenset(
    {Decline.CLOCK, Decline.MEMBERS, Decline.VERSION, Rejection.SENDER, Rejection.ADDRESS}
)
"""Reasons that mean that two nodes are set up differently."""
WHOLE = frozenset(
    {
        *DISAGREEMENTS,
        Decline.TESTING,
        Decline.ROUND,
        Decline.MALFORMED,
        "maintenance",
        "rate_limited",
        "switched_off",
    }
)
"""Reasons to decline any round; a round declined for another reason may still be a light one."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that is over."""

    observation: Observation
    plan: RoundPlan
    """The plan as intended; the observation says whether the round became a light one."""
    seconds: float
    led: bool
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Seconds by which other members' clocks are ahead of this node's, where a round measured it.
    """


@dataclass(eq=False)
class ActiveRound:
    """A round in progress."""

    plan: RoundPlan
    started: float
    led: bool
    reason: str = ""
    """Why the round is a light one."""
    store: LocalStore = field(default_factory=LocalStore)
    shares: dict[str, MemberResult] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The root's message that the round is over, with the root's own view of it."""
    ended: asyncio.Future[RoundReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    scores: dict[str, Scores] = field(default_factory=dict)
    lag: LoopLag = field(default_factory=LoopLag)
    """Whether this agent got enough CPU for its view of the others to be trusted."""
    stage: Stage = Stage.INVITE
    inviting: asyncio.Task[dict[str, dict[str, Any] | PeerError]] | None = None
    successor: ActiveRound | None = None
    """The same group's round under another root that comes first in the order and replaces it."""

    @property
    def decided(self) -> bool:
        """Whether some member's result already names a fault and a member."""
        return any(share.own_finding for share in self.shares.values())

    async def missing(
        self, names: Iterable[str], seconds: float, *, or_decided: bool = False
    ) -> list[str]:
        """Wait for these members' shares, or until it is `decided`; return whose are missing."""

        def left() -> list[str]:
            return [name for name in names if name not in self.shares]

        with contextlib.suppress(TimeoutError):
            async with time_limit(seconds):
                while left() and not (or_decided and self.decided):
                    self.arrived.clear()
                    await self.arrived.wait()
        return left()  # a share may have come in the same turn of the loop as the timeout

    @property
    def offsets(self) -> Mapping[str, float]:
        """Seconds by which the root's clock is ahead; empty until it has sent that."""
        if not self.told.done() or "offset" not in self.told.result():
            return {}
        return {self.plan.root: -self.told.result()["offset"]}


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What a node uses to lead rounds and take part in them."""

    node: ThisNode
    peers: PeerClient
    workers: WorkerPool | None
    """None if all rounds are light."""
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    waited: Callable[[], float | None]
    """Returns the seconds for which this agent has waited for a CPU."""

    async def ask(
        self, name: str, method: str, body: Mapping[str, Any], deadline: float
    ) -> dict[str, Any] | PeerError:
        """Return a peer's answer in an active round, or the error if there is none."""
        try:
            return await self.peers.call(name, method, body, deadline)
        except PeerError as error:
            return error

    async def errors(
        self, names: Iterable[str], method: str, body: Mapping[str, Any], deadline: float
    ) -> dict[str, PeerError]:
        """Call peers of an active round at once; return the errors of those that did not answer."""
        names = list(names)
        answers = await asyncio.gather(*(self.ask(name, method, body, deadline) for name in names))
        found = zip(names, answers, strict=True)
        return {name: answer for name, answer in found if isinstance(answer, PeerError)}

    async def absent(self, names: Iterable[str], deadline: float) -> dict[str, PeerError]:
        """Return which members' agents do not answer an echo, and why."""
        return await self.errors(names, "echo", {"clock": self.wall(), "payload": b""}, deadline)

    async def work(self, active: ActiveRound, store: StoreHandler) -> tuple[RankResult, ...]:
        """Run this node's workers of the active round, which meet in `store`."""
        node = self.node
        assert self.workers is not None  # noqa: S101 - a node without workers is never ready

        def progress(_rank: int, stage: Stage) -> None:
            active.stage = stage

        work = job(
            active.plan,
            node.name,
            address=node.address,
            interface=node.interface,
            adapters=node.adapters,
        )
        return tuple(await self.workers.run(work, store, progress))
