"""The job of a round's workers on one node, and the result that each of them answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind, Outcome, Stage, Timing

if TYPE_CHECKING:
    from collections.abc import Iterable

STAGES = tuple(Stage)
"""In the order in which a round goes through them."""

LATENCY = ((8, 40), (1 << 10, 40), (64 << 10, 40))
"""Small all-reduces: bytes and repetitions.

They are cheap, and what bad cables and busy switches show in first.
"""
BANDWIDTH = ((64 << 20, 5),)
"""A large one, for now and then."""
DEADLINES: dict[Stage, float] = {
    Stage.IMPORT: 60.0,
    Stage.STORE: 5.0,
    Stage.INIT: 15.0,
    Stage.WARM_UP: 10.0,
    Stage.SIZES: 10.0,
    Stage.VERIFY: 10.0,
}
"""Seconds that a worker may stay in a stage; `sizes` counts anew for every size.

Import is the parent's, from a cold disk.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One worker of this node."""

    rank: int
    """Among all ranks of the round."""
    device: str = "cpu"
    """`cpu`, or `cuda:N` in the order of PCI addresses."""
    part: str = ""
    """What a timing of this seat is a timing of, where it is not the whole node.

    A GPU's index or an adapter.
    """
    group: str = ""
    """Ranks with the same name here reduce among themselves: the rail, in a round by rails."""
    group_rank: int | None = None
    """Place in the group; the rank where there is one group."""
    group_size: int | None = None
    adapter: str = ""
    """The adapter that NCCL may use (`mlx5_0:1`); its own choice if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps:
    """What each device does alone in a local round."""

    repetitions: int = 10
    order: int = 4096
    """Rows and columns of the matrices, in half precision on a GPU and single precision elsewhere.
    """
    bytes: int = 64 << 20
    """Of a copy on the device, and of a copy to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """One node's share of a round.

    Nothing in it that comes from another node may be more than a number or a known name.
    """

    kind: Kind
    backend: str
    """`nccl` or `gloo`."""
    world_size: int
    rank_specs: tuple[RankSpec, ...]
    address: str
    """This node's own, in numbers: gloo listens there and nowhere else."""
    interface: str = "lo"
    """The interface that has it, for NCCL's bootstrap."""
    steps: tuple[tuple[int, int], ...] = LATENCY
    """All-reduces: bytes and repetitions."""
    warm_up: int = 2
    """Repetitions of each size before any is timed."""
    device_steps: DeviceSteps | None = None
    deadlines: Mapping[Stage, float] = field(default_factory=lambda: DEADLINES)


OWN = frozenset(
    {
        "stopped",
        "uninterruptible",
        "unkillable",
        "killed",
        "exited",
        "out_of_memory",
        "malformed",
        "no_torch",
        "no_python",
        "writable",
    }
)
"""Reasons that concern the rank itself."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Of a device's matrix products with fixed operands."""

    library: str
    """What it depends on: part, driver and libraries; equal on all devices where this is equal."""
    number: int
    """CRC-32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How one worker ended."""

    rank: int
    outcome: Outcome
    stage: Stage
    """Where it ended; `done` when it went through all."""
    reason: str = ""
    """Slug: `deadline`, `stopped` (by a signal), `uninterruptible` (hangs in the kernel),
    `unkillable`, `killed`, `exited`, `wrong_data`,
    `versions_differ`, `refused`, `connection_lost`, `no_route`, `no_address`, `timeout`, `store`,
    `out_of_memory`, `error`, `malformed`, `ended_early` (another rank had failed), `parent`,
    `no_python`, `no_torch`, `writable`, `busy` (its predecessor cannot be killed),
    `starved` (this node got too little CPU to tell).
    """
    detail: str = ""
    """Free text, for a person."""
    timings: tuple[Timing, ...] = ()
    entered: int = 0
    """Collectives that it began."""
    left: int = 0
    """Collectives that it came back from (on a GPU: that it queued)."""
    versions: str = ""
    """Of torch and CUDA."""
    part: str = ""
    """The GPU's index in a round of one node."""
    checksum: Checksum | None = None
    """None where the device's libraries do not promise equal bits, or the rank did not come so far."""

    @property
    def own_finding(self) -> bool:
        """Whether the result says what is wrong with the rank, not that it waited in vain."""
        return self.outcome is Outcome.CORRUPTED or self.reason in OWN

    @property
    def progress(self) -> tuple[int, int, int]:
        """How far the rank came in its job; comparable with others' of the same round."""
        return STAGES.index(self.stage), self.entered, self.left


def late(
    results: Iterable[RankResult], furthest: tuple[int, int, int] | None = None
) -> tuple[int, ...]:
    """Return the ranks to look at when the job of a round failed.

    Those with a finding of their own, else those that had not come as far as others.

    A finding of its own is wrong data, an end by a signal or an error of the process; one that
    merely waits for another has none. `furthest` is the progress that is to be compared with; that
    of the rank that came furthest where it is not given.
    """
    results = tuple(results)
    guilty = tuple(result.rank for result in results if result.own_finding)
    if guilty or all(result.outcome is Outcome.OK for result in results):
        return guilty
    furthest = furthest or max(result.progress for result in results)
    return tuple(result.rank for result in results if result.progress < furthest)
