"""The records of a round: its plan, what members report in it, how it ended, and its observation,
from which verdicts are drawn. Agents exchange them as they are declared here.
"""

from __future__ import annotations

import enum
import operator
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from dshealthd.core import schema
from dshealthd.core.schema import Array, Choice, Integer, Number, Row
from dshealthd.probe.peers.fields import (
    LATE,
    MAX_PAIRS,
    MAX_RANKS_OF_NODE,
    MAX_REPETITIONS,
    MAX_SIZE,
    MAX_SIZES,
    MEMBERS,
    NAME,
    RATIO,
    KnownReason,
    Ratios,
)

FLOOR = 1e-6
"""Lower bound in seconds of every timing, about the cost of ten system calls: even the smallest
collective or echo takes longer."""
HARD = 1000.0
"""The ratio of a failed round, which gave no time at all."""
FAR_BELOW = 4
"""Factor by which one bad ratio lies below another, so as not to explain it. Busy CPUs make the
collectives of all pairs take several times as long; meanwhile a node or link that is slower by far
is accused of that.
"""
ON_DEMAND = -1
"""The epoch of an unscheduled round: a confirmation, or one that a person requested."""
EPOCH = Integer(ON_DEMAND)
Steps = Annotated[
    tuple[tuple[int, int], ...],
    Array(Row((Integer(1, MAX_SIZE), Integer(1, MAX_REPETITIONS))), MAX_SIZES),
]
"""All-reduces: bytes and repetitions of each."""


class RoundKind(enum.StrEnum):
    """Kinds of rounds; the label `kind`."""

    LOCAL = "local"
    """The GPUs of one node among themselves; no other node takes part."""
    PAIR = "pair"
    """Two nodes, all their GPUs or one rank each."""
    RAIL = "rail"
    """GPU k with GPU k of another node, each through the adapter nearest to it."""
    LIGHT = "light"
    """An echo between the agents of two nodes; no GPU is touched."""


class Stage(enum.StrEnum):
    """How far a round got, in this order; the stage at which it stopped shows what is broken."""

    INVITE = "invite"
    IMPORT = "import"
    STORE = "store"
    INIT = "init"
    WARM_UP = "warm_up"
    SIZES = "sizes"
    VERIFY = "verify"
    DONE = "done"


class Outcome(enum.StrEnum):
    """How a round ended; the label `outcome`."""

    OK = "ok"
    DECLINED = "declined"
    """A member refused to take part, with a reason (busy GPU, draining, different member list,
    another name, already testing).
    """
    UNREACHABLE = "unreachable"
    """No answer: packets are dropped, or the node is off."""
    REFUSED = "refused"
    """The connection was refused or reset: the node is up, but its agent or port is not."""
    UNAUTHORIZED = "unauthorized"
    """One side does not accept the key of the other."""
    HUNG = "hung"
    """A stage passed its deadline."""
    FAILED = "failed"
    """A stage ended with an error."""
    CORRUPTED = "corrupted"
    """The collective completed with a wrong result."""
    INCONCLUSIVE = "inconclusive"
    """Something outside the round disturbed it, such as a stranger on a worker's port, or a name
    server that does not answer.
    """


class Backend(enum.StrEnum):
    """What a round runs on: a backend of torch.distributed, or none."""

    NCCL = "nccl"
    GLOO = "gloo"
    AGENT = "agent"
    """No backend: a light round, between the agents alone."""


class Op(enum.StrEnum):
    """A timed operation; the label `op`."""

    ALL_REDUCE = "all_reduce"
    MATRIX_PRODUCT = "matrix_product"
    DEVICE_COPY = "device_copy"
    HOST_TO_DEVICE = "host_to_device"
    ECHO = "echo"


@dataclass(frozen=True, slots=True)
class Timing:
    """One operation at one size."""

    op: Annotated[str, Choice(Op)]
    size: Annotated[int, Integer(0, MAX_SIZE)]
    """Bytes of the payload of each rank."""
    seconds: Annotated[float, Number(0, 1e6)]
    """Median over the repetitions."""
    bus_bandwidth: Annotated[float, Number(0, 1e14)]  # fifty times a B200's NVLink bandwidth
    """Bytes per second in nccl-tests' terms. For an all-reduce of n ranks, size / seconds ·
    2(n-1)/n.
    """
    part: Annotated[str, NAME] = ""
    """GPU index or adapter that was timed; empty for the whole member."""


def slowest(timings: Iterable[Timing], *fields: str) -> list[Timing]:
    """Return the slowest of all timings with the same values in these fields."""
    key = operator.attrgetter(*fields)
    found: dict[object, Timing] = {}
    for timing in timings:
        known = found.get(key(timing))
        if known is None or timing.seconds > known.seconds:
            found[key(timing)] = timing
    return list(found.values())


Timings = Annotated[tuple[Timing, ...], Array(schema.of(Timing), 8 * MAX_SIZES)]
"""Of the rails of a node with eight GPUs at most, if all sizes are measured that a round may have.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One round, as its invitation has it."""

    round: Annotated[str, NAME] = field(default_factory=lambda: secrets.token_hex(8))
    """Random name that tells the round's messages from those of other rounds."""
    epoch: Annotated[int, EPOCH]
    kind: RoundKind
    backend: Backend
    members: Annotated[tuple[str, ...], MEMBERS]
    """Root first; ranks follow this order."""
    digest: Annotated[str, NAME]
    """Digest of the membership as the root sees it."""
    steps: Steps = ()
    ranks: Annotated[int, Integer(1, MAX_RANKS_OF_NODE)] = 1
    """Ranks of each node; with NCCL they use the GPUs from the first on."""

    @property
    def root(self) -> str:
        """The member that leads the planned round."""
        return self.members[0]

    def has_ranks(self, member: str, ranks: Iterable[int]) -> bool:
        """Return whether these are exactly the ranks that the plan assigns to a member."""
        first = self.members.index(member) * self.ranks
        return sorted(ranks) == list(range(first, first + self.ranks))

    def light(self) -> RoundPlan:
        """Return the plan of the light round that replaces this one if GPUs may not be used."""
        return replace(self, kind=RoundKind.LIGHT, backend=Backend.AGENT, steps=(), ranks=1)


@dataclass(frozen=True, slots=True)
class PeerReport:
    """A peer's report in a round: on itself, and on the peers that it has just met."""

    node: Annotated[float | None, schema.OrNull(RATIO)] = None
    """Its own score."""
    parts: Annotated[tuple[str, ...], Array(NAME, 2 * MAX_RANKS_OF_NODE)] = ()
    """Parts of its own that it finds slow."""
    uplink: bool = False
    """Whether its rounds are slow if they leave its leaf, and not if they stay inside."""
    pairs: Annotated[Mapping[str, float], Ratios()] = field(default_factory=dict)
    """The ratios of its last rounds, by peer."""
    echoes: Annotated[tuple[str, ...], Array(NAME, MAX_PAIRS)] = ()
    """Those peers with which these were echoes alone."""

    def is_well(self, but: str, high: float) -> bool:
        """Return whether most rounds in the report, except those with `but`, were good. True if
        there are none.
        """
        rounds = [value < high for peer, value in self.pairs.items() if peer != but]
        return not rounds or 2 * sum(rounds) > len(rounds)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """How a round ended, without what its plan already says."""

    outcome: Outcome
    stage: Stage
    timings: Timings = ()
    late: Annotated[tuple[str, ...], LATE] = ()
    """The member that lagged behind the other when the round ended, whom the outcome implicates;
    empty if neither or both did.
    """
    reason: Annotated[str, KnownReason()] = ""
    """Slug of a decline or error, from a bounded set; never free text."""

    def observation(self, plan: RoundPlan, told: PeerReport | None, at: float) -> Observation:
        """Return the round's result as an observation, with what the other member reported."""
        return Observation(
            plan.epoch,
            plan.kind,
            plan.backend,
            plan.members,
            self.outcome,
            self.stage,
            self.timings,
            self.late,
            self.reason,
            told,
            at,
        )


@dataclass(frozen=True, slots=True)
class Observation:
    """One round as one member saw it."""

    epoch: Annotated[int, EPOCH]
    """Number of the scheduled round; -1 for one on demand."""
    kind: RoundKind
    backend: Annotated[str, Choice(Backend)]
    members: Annotated[tuple[str, ...], MEMBERS]
    """Names of the nodes that should have taken part, root first; one in a local round."""
    outcome: Outcome
    stage: Stage
    timings: Timings = ()
    late: Annotated[tuple[str, ...], LATE] = ()
    """As in `RoundResult`."""
    reason: Annotated[str, KnownReason()] = ""
    told: PeerReport | None = None
    """What the other member reported, or the second one if this node is none of them."""
    at: Annotated[float, schema.UNIX_TIME] = 0.0
    """Unix time in seconds of the round's end."""


class Part(enum.StrEnum):
    """A kind of part that can be accused; the label `kind` of `dshealthd_suspect`."""

    NODE = "node"
    GPU = "gpu"
    NIC = "nic"
    LINK = "link"
    LEAF = "leaf"


@dataclass(frozen=True, slots=True)
class Suspect:
    """An accusation."""

    part: Part
    component: str
    """`node-17`, `node-17/gpu3`, `node-17/mlx5_2`, `node-17--node-21` (sorted), `leaf-4`."""
    reason: str
    """`slow`, or an `Outcome` other than ok and declined, or `ambiguous`."""
