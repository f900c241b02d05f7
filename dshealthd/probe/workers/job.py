"""The job of a round's workers on one node, and the result of each worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from dshealthd.core.schema import Integer, transient
from dshealthd.probe.observation import Outcome, Stage, Timing
from dshealthd.probe.peers.fields import MAX_RANKS_OF_NODE, KnownReason

STAGES = tuple(Stage)
"""All stages, in the order of a round."""

LATENCY = tuple((size, 40) for size in (8, 1 << 10, 64 << 10))
"""Small all-reduces, cheap and the first to show bad cables: bytes and repetitions."""
BANDWIDTH = ((64 << 20, 5),)
"""A large all-reduce between GPUs, run now and then."""
GLOO_BANDWIDTH = ((4 << 20, 5),)
"""The same between nodes without GPUs, which share the network with other traffic: 34 MB with the
untimed ones. Below 1 MiB an all-reduce tells latency.
"""
WARM_UP = 2
"""Untimed repetitions of each size before the timed ones."""
OWN = frozenset(
    {"stopped", "uninterruptible", "unkillable", "killed", "exited", "out_of_memory", "malformed"}
)
"""Reasons that mean a fault of the rank itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One worker of this node."""

    rank: int
    """Number among all ranks of the round."""
    device: str = "cpu"
    """`cpu`, or `cuda:N` in the order of PCI addresses."""
    part: str = ""
    """The part that this rank's timings measure: a GPU's index or an adapter; empty for the node.
    """
    group: str = ""
    """Ranks with the same group reduce among themselves: the rail, in a round by rails."""
    group_rank: int | None = None
    """Rank in the group; None for `rank`, if there is one group."""
    group_size: int | None = None
    adapter: str = ""
    """The adapter that NCCL may use (`mlx5_0:1`); empty lets NCCL choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps:
    """What each device does alone in a local round."""

    repetitions: int = 10
    order: int = 4096
    """Rows and columns of the matrices, in half precision on a GPU and single precision elsewhere.
    """
    bytes: int = 64 << 20
    """Size of a copy on the device, and of a copy to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """One node's part of a round. Any value in it that comes from another node must be a number or
    a known name.
    """

    backend: str
    """`nccl` or `gloo`."""
    world_size: int
    rank_specs: tuple[RankSpec, ...]
    address: str
    """This node's own numeric address: gloo listens there and nowhere else."""
    interface: str = "lo"
    """The interface that has the address, for NCCL's bootstrap."""
    steps: tuple[tuple[int, int], ...]
    """All-reduces: bytes and repetitions of each."""
    warm_up: int = WARM_UP
    device_steps: DeviceSteps | None = None
    deadlines: Mapping[Stage, float]
    """Seconds that a worker may stay in a stage; `sizes` restarts for every size."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksum of a device's matrix products with fixed operands."""

    library: str
    """GPU model, driver and libraries; devices with equal ones must have equal checksums."""
    number: int
    """CRC-32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How one worker ended. The root gets it without what is `transient`."""

    rank: Annotated[int, Integer(0, 2 * MAX_RANKS_OF_NODE)]
    outcome: Outcome
    stage: Stage
    """The stage in which it ended; `done` after all of them."""
    reason: Annotated[str, KnownReason()] = ""
    """Slug: `deadline`, `stopped` (by a signal), `uninterruptible` (hangs in the kernel),
    `unkillable`, `killed`, `exited`, `wrong_data`,
    `versions_differ`, `refused`, `connection_lost`, `no_route`, `no_address`, `timeout`, `store`,
    `out_of_memory`, `error`, `malformed`, `ended_early` (another rank failed first), `parent`,
    `no_python`, `no_torch`, `writable`, `busy` (its predecessor cannot be killed),
    `starved` (this node got too little CPU to tell), `busy_gpu` (a job has started beside it).
    """
    detail: str = transient(default="")
    """Free text, for a person."""
    timings: tuple[Timing, ...] = transient(default=())
    entered: Annotated[int, Integer()] = 0
    """Collectives that it entered."""
    left: Annotated[int, Integer()] = 0
    """Collectives that it left (on a GPU: that it queued)."""
    part: str = transient(default="")
    """The part that the rank's timings measure, as in `RankSpec.part`."""
    checksum: Checksum | None = transient(default=None)
    """None if the device's libraries do not promise equal bits or the rank did not get that far."""

    @property
    def own_finding(self) -> bool:
        """Whether the result shows a fault of the rank itself, not just that it waited in vain.
        What fails in its own process before it has spoken to any other is one.
        """
        return (
            self.outcome is Outcome.CORRUPTED
            or self.reason in OWN
            or (self.outcome is Outcome.FAILED and self.stage is Stage.IMPORT)
        )

    @property
    def progress(self) -> tuple[int, int, int]:
        """How far the rank came in its job; comparable between ranks of the same round."""
        return STAGES.index(self.stage), self.entered, self.left


def late(results: Iterable[RankResult]) -> tuple[int, ...]:
    """Return the suspect ranks of a round whose workers failed.

    These are the ranks with a fault of their own, or else those that lag behind the others.

    A fault of its own is wrong data, an end by a signal or an error of the process; a rank that
    merely waits for another has none.
    """
    results = tuple(results)
    guilty = tuple(result.rank for result in results if result.own_finding)
    if guilty or all(result.outcome is Outcome.OK for result in results):
        return guilty
    furthest = max(result.progress for result in results)
    return tuple(result.rank for result in results if result.progress < furthest)
