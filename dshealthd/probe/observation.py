"""The observation of a round: the record that rounds produce and verdicts are drawn from, and
every known reason for which rounds and calls fail, so that labels stay bounded.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
MAX_PAIRS = 6
"""Most pairs that a report has; only those of this epoch or the last one are reported."""
OTHER = "other"
"""A reason from a peer that this release does not know."""
REASONS = frozenset({
    OTHER, "already_testing", "answer_not_signed", "bad_answer", "busy", "busy_cpu", "busy_gpu",
    "clock_differs", "closed", "connect_timeout",
    "connection_lost", "deadline", "draining", "duty", "ended_early", "error", "exited",
    "gpu_unknown", "gpus_differ", "implausible", "key", "killed", "maintenance", "malformed",
    "members_differ", "name_server", "name_timeout", "name_unknown", "no_address", "no_answer",
    "no_credentials", "no_cuda", "no_python", "no_route", "no_torch", "not_a_member",
    "not_acknowledged", "not_permitted", "out_of_memory", "own_name", "parent",
    "peer_error", "policy_never", "rate_limited", "refused", "rejected", "reset",
    "resting", "silent", "starved", "stopped", "store", "switched_off",
    "system_error", "timed_out", "timeout", "too_many_calls",
    "uninterruptible", "unkillable", "unknown_method", "unknown_round",
    "version_differs", "versions_differ", "warming_up", "writable", "wrong_address",
    "wrong_data", "wrong_receiver",
})  # fmt: skip


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
    already testing).
    """
    UNREACHABLE = "unreachable"
    """No answer: packets are dropped, or the node is off."""
    REFUSED = "refused"
    """The connection was refused or reset: the node is up, but its agent or port is not."""
    UNAUTHORIZED = "unauthorized"
    """One side does not accept the key of the other, or the name by which it is called."""
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

    op: str
    """One of `Op`."""
    size: int
    """Bytes of the payload of each rank."""
    seconds: float
    """Median over the repetitions."""
    bus_bandwidth: float
    """Bytes per second in nccl-tests' terms. For an all-reduce of n ranks, size / seconds ·
    2(n-1)/n.
    """
    part: str = ""
    """GPU index or adapter that was timed; empty for the whole member."""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """A peer's report in a round: on itself, and on the peers that it has just met."""

    node: float | None = None
    """Its own score."""
    parts: frozenset[str] = frozenset()
    """Parts of its own that it finds slow."""
    uplink: bool = False
    """Whether its rounds are slow if they leave its leaf, and not if they stay inside."""
    pairs: Mapping[str, float] = field(default_factory=dict)
    """The ratios of its last rounds, by peer."""

    def message(self) -> dict[str, Any]:
        """Return the report as peers get it."""
        pairs = [{"peer": peer, "ratio": ratio} for peer, ratio in self.pairs.items()]
        node = {} if self.node is None else {"node": self.node}
        return {"parts": sorted(self.parts), "uplink": self.uplink, "pairs": pairs, **node}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> PeerReport:
        """Return the report in a peer's message."""
        pairs = {pair["peer"]: pair["ratio"] for pair in message["pairs"]}
        return cls(message.get("node"), frozenset(message["parts"]), message["uplink"], pairs)

    def is_well(self, but: str, high: float) -> bool:
        """Return whether most rounds in the report, except those with `but`, were good. True if
        there are none.
        """
        rounds = [value < high for peer, value in self.pairs.items() if peer != but]
        return not rounds or 2 * sum(rounds) > len(rounds)


@dataclass(frozen=True, slots=True)
class Observation:
    """One round as one member saw it."""

    epoch: int
    """Number of the scheduled round; -1 for one on demand."""
    kind: RoundKind
    backend: str
    """`nccl`, `gloo`, or `agent` for a light round."""
    members: tuple[str, ...]
    """Names of the nodes that should have taken part, root first; one in a local round."""
    outcome: Outcome
    stage: Stage
    timings: tuple[Timing, ...] = ()
    late: tuple[str, ...] = ()
    """The member that lagged behind the other when the round ended, whom the outcome implicates;
    empty if neither or both did.
    """
    reason: str = ""
    """Slug of a decline or error, from a bounded set; never free text."""
    told: PeerReport | None = None
    """What the other member reported, or the second one if this node is none of them."""
    at: float = 0.0
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


def known_reason(reason: str) -> str:
    """Return a known reason unchanged and `other` for an unknown one; empty stays empty."""
    return reason if not reason or reason in REASONS else OTHER
