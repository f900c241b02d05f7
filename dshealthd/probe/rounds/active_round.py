"""An active round as one agent sees it: its state, what it needs of its node, and its report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.linux.starvation import LoopLag
from dshealthd.probe.node import ThisNode
from dshealthd.probe.observation import Observation, PeerReport, RoundPlan, Stage
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import PeerError, Rejection
from dshealthd.probe.rounds.conclusion import MemberResult
from dshealthd.probe.rounds.plan import job
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
    seconds: float
    led: bool
    offset: float | None = None
    """Seconds by which the other member's clock is ahead of this node's, where it is known."""


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
    """Set once the root has the member's share."""
    told: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The root's message that the round is over."""
    report: PeerReport | None = None
    """What the other member has reported."""
    lag: LoopLag = field(default_factory=LoopLag)
    """Whether this agent got enough CPU for its view of the others to be trusted."""
    stage: Stage = Stage.INVITE
    offset: float | None = None
    """Seconds by which the other member's clock is ahead of this node's, where it is known."""
    inviting: bool = False
    """Whether this node leads it and awaits the member's answer to its invitation."""
    has_given_way: bool = False
    """Whether one that the other member has begun at the same time takes its place."""

    @property
    def peer(self) -> str:
        """The other member."""
        return self.plan.members[1] if self.led else self.plan.root

    @property
    def decided(self) -> bool:
        """Whether one of the members' results already names a fault and a member."""
        return any(share.own_finding for share in self.shares.values())


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

    async def query(
        self, name: str, method: str, body: Mapping[str, Any], deadline: float
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
