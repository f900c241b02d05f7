"""The plan of a round: agreed on by its invitation, and turned into a node's job for workers."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from dshealthd import __version__
from dshealthd.probe.observation import RoundKind, Stage
from dshealthd.probe.peers.messages import Backend
from dshealthd.probe.workers.job import (
    BANDWIDTH,
    GLOO_BANDWIDTH,
    LATENCY,
    DeviceSteps,
    RankSpec,
    WorkerJob,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dshealthd.probe.observation import Timing

ON_DEMAND = -1
"""The epoch of an unscheduled round: a confirmation, or one that a person requested."""
PAIR = 2
"""Members of a round between nodes."""
WARM_UP = 2
DEADLINES: Mapping[Stage, float] = {
    Stage.IMPORT: 10.0,  # torch was imported before the invitation was answered
    Stage.STORE: 4.0,
    Stage.INIT: 12.0,
    Stage.WARM_UP: 8.0,
    Stage.SIZES: 8.0,
    Stage.VERIFY: 8.0,
}
"""Seconds that a worker may stay in a stage."""


Steps = tuple[tuple[int, int], ...]
"""All-reduces: bytes and repetitions of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One round."""

    round: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random name that tells the round's messages from those of other rounds."""
    epoch: int
    kind: RoundKind
    backend: Backend
    members: tuple[str, ...]
    """Root first; ranks follow this order."""
    digest: str
    """Digest of the membership as the root sees it."""
    steps: Steps = ()
    ranks: int = 1
    """Ranks of each node; with NCCL they use the GPUs from the first on."""
    version: str = __version__
    """Members of different versions decline each other's rounds."""

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

    def invitation(self) -> dict[str, Any]:
        """Return the message with the plan that invites a member."""
        steps = [{"size": size, "repetitions": repetitions} for size, repetitions in self.steps]
        return {**asdict(self), "steps": steps}

    @classmethod
    def invited(cls, body: Mapping[str, Any]) -> RoundPlan:
        """Return the plan of an invitation."""
        steps = tuple((step["size"], step["repetitions"]) for step in body["steps"])
        names = {known.name for known in fields(cls)} - {"steps"}
        return cls(steps=steps, **{name: body[name] for name in names})

    def gpu_seconds(self, timings: Sequence[Timing]) -> float:
        """Return the seconds of each GPU for these operations, untimed ones included."""
        repetitions = dict(self.steps)
        return sum(
            timing.seconds * (repetitions.get(timing.size, 1) + WARM_UP + 1) for timing in timings
        )


def local_plan(me: str, gpus: int, epoch: int = ON_DEMAND) -> RoundPlan:
    """Return the plan of a round among this node's own GPUs, or two CPU processes without GPUs."""
    return RoundPlan(
        epoch=epoch,
        kind=RoundKind.LOCAL,
        backend=Backend.NCCL if gpus else Backend.GLOO,
        members=(me,),
        digest="",
        ranks=gpus or PAIR,
    )


def steps_at(epoch: int, large_every: int, backend: Backend) -> Steps:
    """Return the collectives planned for an epoch: small ones always, a large one now and then. Two
    epochs in a row have the large one, so that it runs both inside leaves and between them.
    """
    large = BANDWIDTH if backend is Backend.NCCL else GLOO_BANDWIDTH
    return LATENCY + large if large_every and epoch % (2 * large_every) < PAIR else LATENCY


def job(
    plan: RoundPlan, me: str, *, address: str, interface: str, adapters: Sequence[str] = ()
) -> WorkerJob:
    """Return one member's job in a planned round between nodes."""
    number = plan.members.index(me)
    rank_specs = []
    for gpu in range(plan.ranks):
        device = f"cuda:{gpu}" if plan.backend is Backend.NCCL else "cpu"
        spec = RankSpec(rank=number * plan.ranks + gpu, device=device)
        if plan.kind is RoundKind.RAIL:
            adapter = adapters[gpu] if gpu < len(adapters) else ""
            spec = replace(
                spec,
                part=adapter or str(gpu),
                adapter=adapter,
                group=f"rail{gpu}",
                group_rank=number,
                group_size=PAIR,
            )
        rank_specs.append(spec)
    return WorkerJob(
        backend=plan.backend,
        world_size=plan.ranks * PAIR,
        rank_specs=tuple(rank_specs),
        address=address,
        interface=interface,
        steps=plan.steps,
        warm_up=WARM_UP,
        deadlines=DEADLINES,
    )


def local_job(gpus: int, steps: Steps, deadlines: Mapping[Stage, float]) -> WorkerJob:
    """Return the job of a local round."""
    rank_specs = tuple(
        RankSpec(
            rank=rank, device=f"cuda:{rank}" if gpus else "cpu", part=str(rank) if gpus else ""
        )
        for rank in range(gpus or PAIR)
    )
    return WorkerJob(
        backend=Backend.NCCL if gpus else Backend.GLOO,
        world_size=len(rank_specs),
        rank_specs=rank_specs,
        address="127.0.0.1",
        steps=steps,
        warm_up=WARM_UP,
        device_steps=DeviceSteps() if gpus else None,
        deadlines=deadlines,
    )
