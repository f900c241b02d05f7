"""What a round runs: its collectives, its deadlines, and each node's job for its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dshealthd.probe.observation import (
    ON_DEMAND,
    Backend,
    RoundKind,
    RoundPlan,
    Stage,
    Steps,
    Timing,
)
from dshealthd.probe.workers.job import (
    BANDWIDTH,
    GLOO_BANDWIDTH,
    LATENCY,
    WARM_UP,
    DeviceSteps,
    RankSpec,
    WorkerJob,
)

PAIR = 2
"""Members of a round between nodes."""
PAYLOAD = bytes(range(256)) * 187
"""Payload of an echo, sent there and back; in base64 it fits in one message."""
DEADLINES: Mapping[Stage, float] = {
    Stage.IMPORT: 10.0,  # torch was imported before the invitation was answered
    Stage.STORE: 4.0,
    Stage.INIT: 12.0,
    **dict.fromkeys((Stage.WARM_UP, Stage.SIZES, Stage.VERIFY), 8.0),
}
"""Seconds that a worker may stay in a stage: in all together, less than a member waits for its root
(`member.ROUND`).
"""


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
        device_steps=DeviceSteps() if gpus else None,
        deadlines=deadlines,
    )


def gpu_seconds(plan: RoundPlan, timings: Sequence[Timing]) -> float:
    """Return the seconds of each GPU for these operations, untimed ones included."""
    repetitions = dict(plan.steps)
    return sum(
        timing.seconds * (repetitions.get(timing.size, 1) + WARM_UP + 1) for timing in timings
    )
