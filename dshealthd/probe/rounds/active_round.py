"""An active round as one agent sees it, and its report."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from dshealthd.linux.starvation import LoopLag
from dshealthd.probe.members.absences import MAINTENANCE
from dshealthd.probe.observation import Observation, PeerReport, RoundPlan, Stage
from dshealthd.probe.peers.protocol import Rejection
from dshealthd.probe.peers.resolver import NAME_UNKNOWN
from dshealthd.probe.workers.job import RankResult
from dshealthd.probe.workers.store import LocalStore


class Decline:
    """Reasons to decline a round, besides those of the policy, which make a round light."""

    CLOCK = "clock_differs"
    MEMBERS = "members_differ"
    VERSIONS = "versions_differ"
    """The workers have different versions of torch or NCCL."""
    TESTING = "already_testing"
    ROUND = "unknown_round"


DISAGREEMENTS = frozenset(
    {
        Decline.CLOCK,
        Decline.MEMBERS,
        Decline.VERSIONS,
        NAME_UNKNOWN,
        Rejection.VERSION,
        Rejection.RECEIVER,
        Rejection.SENDER,
        Rejection.SELF,
        Rejection.ADDRESS,
        Rejection.KEY,
    }
)
"""Reasons that lie in how two nodes are set up, not in their hardware or network."""
WHOLE = frozenset(
    {
        *DISAGREEMENTS,
        Decline.TESTING,
        Decline.ROUND,
        MAINTENANCE,
        Rejection.MALFORMED,
        Rejection.RATE,
        Rejection.OFF,
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
    shares: dict[str, tuple[RankResult, ...]] = field(default_factory=dict)
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
        return any(rank.own_finding for share in self.shares.values() for rank in share)
