"""An active round as one agent has it: what it knows, needs of its node, and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dshealthd.linux.starvation import LoopLag
from dshealthd.probe.observation import Observation, Stage
from dshealthd.probe.peers.contract import PeerError, Rejection
from dshealthd.probe.rounds.conclusion import MemberResult, Scores
from dshealthd.probe.rounds.plan import RoundPlan, job
from dshealthd.probe.rounds.remote_store import Peers
from dshealthd.probe.workers.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.workers.job import RankResult, WorkerJob
    from dshealthd.probe.workers.store import StoreHandler


class Decline:
    """Reasons to take no part, beside those of the policy, which make a round light."""

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
"""Reasons that say that two nodes are set up differently."""
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
"""Declined as a whole: what is declined for another reason may still be a light round."""


class Workers(Protocol):
    """The processes of this node that run collectives."""

    async def run(
        self, job: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> list[RankResult]:
        """Run this node's ranks of the round and return their results; when cancelled, end them."""


class LocalNode(Protocol):
    """What a round has to know of the node that it runs on."""

    name: str
    address: str
    """For the workers, in numbers."""
    interface: str

    @property
    def adapters(self) -> Sequence[str]:
        """The adapter next to each GPU, for an active round, or none."""

    def membership(self) -> Membership:
        """Return the members as they are believed to be while the round is active."""

    def epoch(self) -> int:
        """Return the number of the epoch by this node's clock, for an active round."""

    def gpus(self) -> int:
        """Return how many GPUs this node has for the ranks of a round."""

    def objection(self, plan: RoundPlan) -> str:
        """Return why no workers may run for the round's plan now, as a slug; empty if they may."""

    def scores(self) -> Scores:
        """Return what the active round tells peers of this node."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that is over."""

    observation: Observation
    plan: RoundPlan
    """As it was meant: where it became a light one, that is told by the observation."""
    seconds: float
    led: bool
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Seconds by which the clocks of others are ahead of this node's, as far as a light round told.
    """


@dataclass(eq=False)
class ActiveRound:
    """A round in progress."""

    plan: RoundPlan
    started: float
    led: bool
    reason: str = ""
    """Why it is a light one."""
    store: LocalStore = field(default_factory=LocalStore)
    shares: dict[str, MemberResult] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """That the root says the round is over, and how it sees it."""
    ended: asyncio.Future[RoundReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    scores: dict[str, Scores] = field(default_factory=dict)
    lag: LoopLag = field(default_factory=LoopLag)
    """Whether this agent had the CPU to see what it says of others."""
    stage: Stage = Stage.INVITE
    inviting: asyncio.Task[dict[str, dict[str, Any] | PeerError]] | None = None
    successor: ActiveRound | None = None
    """The same group's round under another root, which came first in its order."""

    @property
    def decided(self) -> bool:
        """Whether a share of the active round tells already what is wrong, and with whom."""
        return any(share.own_finding for share in self.shares.values())

    @property
    def offsets(self) -> Mapping[str, float]:
        """Seconds by which the clock of the active round's root is ahead of this member's, where
        the root has told.
        """
        if not self.told.done() or "offset" not in self.told.result():
            return {}
        return {self.plan.root: -self.told.result()["offset"]}


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What a node has for its part in rounds."""

    node: LocalNode
    peers: Peers
    workers: Workers | None
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    waited: Callable[[], float | None]
    progress: Callable[[int, Stage], None]

    async def ask(
        self, name: str, method: str, body: Mapping[str, Any], deadline: float
    ) -> dict[str, Any] | PeerError:
        """Return a peer's answer in an active round, or why there is none."""
        try:
            return await self.peers.call(name, method, body, deadline)
        except PeerError as error:
            return error

    async def work(self, active: ActiveRound, store: StoreHandler) -> tuple[RankResult, ...]:
        """Run this node's workers of the active round, which meet in `store`."""
        node = self.node
        assert self.workers is not None  # noqa: S101 - who has none is not ready

        def progress(rank: int, stage: Stage) -> None:
            active.stage = stage
            self.progress(rank, stage)

        work = job(
            active.plan,
            node.name,
            address=node.address,
            interface=node.interface,
            adapters=node.adapters,
        )
        return tuple(await self.workers.run(work, store, progress))
