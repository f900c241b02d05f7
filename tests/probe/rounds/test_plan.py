"""What a round's collectives send, and what each node's workers do of it."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import Backend, RoundKind, RoundPlan, Stage, Timing
from dshealthd.probe.rounds import member
from dshealthd.probe.rounds.plan import DEADLINES, gpu_seconds, job, local_job, local_plan, steps_at
from dshealthd.probe.workers.job import BANDWIDTH, LATENCY, DeviceSteps, RankSpec


def test_the_sizes_of_collectives() -> None:
    """Their bytes are label values, which queries name: from the least one to a gradient's. Small
    ones are repeated often, as each takes microseconds.
    """
    small = (8, 40), (1024, 40), (65536, 40)
    assert steps_at(2, 1, Backend.NCCL) == (*small, (64 * 1024 * 1024, 5))
    assert steps_at(2, 1, Backend.GLOO) == (*small, (4 * 1024 * 1024, 5))


def test_the_large_collective() -> None:
    """It runs in two epochs of 2 * `large_every`, or never; GPUs have a larger one."""
    large = LATENCY + BANDWIDTH
    assert [steps_at(epoch, 3, Backend.NCCL) == large for epoch in range(7)] == [
        *(True, True, False, False, False, False, True)
    ]
    assert {steps_at(epoch, 0, Backend.NCCL) for epoch in range(7)} == {LATENCY}


@pytest.mark.parametrize(("kind", "backend", "ranks", "specs"), [
    (RoundKind.PAIR, Backend.GLOO, 1, [RankSpec(rank=1)]),
    (
        RoundKind.PAIR, Backend.NCCL, 2,
        [RankSpec(rank=2, device="cuda:0"), RankSpec(rank=3, device="cuda:1")],
    ),
    (
        RoundKind.RAIL, Backend.NCCL, 2,
        [
            RankSpec(
                rank=2, device="cuda:0", part="mlx5_0", adapter="mlx5_0", group="rail0",
                group_rank=1, group_size=2,
            ),
            RankSpec(
                rank=3, device="cuda:1", part="1", group="rail1", group_rank=1, group_size=2
            ),
        ],
    ),
])  # fmt: skip
def test_work_of_a_node(
    kind: RoundKind, backend: Backend, ranks: int, specs: list[RankSpec]
) -> None:
    """The second node's ranks follow the first's. Along rails each GPU meets its like through its
    own adapter, which gives the part its name, where one is configured.
    """
    plan = RoundPlan(
        epoch=0, kind=kind, backend=backend, members=("a", "b"), digest="", ranks=ranks
    )
    work = job(plan, "b", address="10.0.0.2", interface="eth0", adapters=("mlx5_0",))
    assert (work.backend, work.world_size, work.rank_specs) == (backend, 2 * ranks, (*specs,))
    assert (work.warm_up, work.device_steps) == (2, None)


@pytest.mark.parametrize(("gpus", "backend", "devices", "parts"), [
    (0, Backend.GLOO, ["cpu", "cpu"], ["", ""]),
    (3, Backend.NCCL, ["cuda:0", "cuda:1", "cuda:2"], ["0", "1", "2"]),
])  # fmt: skip
def test_work_of_a_node_alone(
    gpus: int, backend: Backend, devices: list[str], parts: list[str]
) -> None:
    """Each GPU is a rank, and is timed alone, too; without GPUs two processes meet."""
    plan, work = local_plan("a", gpus), local_job(gpus, LATENCY, {})
    assert (plan.backend, plan.ranks, plan.epoch) == (backend, len(devices), -1)
    assert (work.backend, work.world_size) == (backend, len(devices))
    assert [spec.rank for spec in work.rank_specs] == [*range(len(devices))]
    assert [spec.device for spec in work.rank_specs] == devices
    assert [spec.part for spec in work.rank_specs] == parts
    alone = DeviceSteps(repetitions=10, order=4096, bytes=64 * 1024 * 1024)
    assert work.device_steps == (alone if gpus else None)


def test_a_round_that_hangs_ends() -> None:
    """Its stages together last 50 s, half of them the collectives'; a member waits a minute."""
    assert (sum(DEADLINES.values()), member.ROUND) == (50.0, 60.0)
    assert sum([*DEADLINES.values()][3:]) == 24.0
    assert DEADLINES[Stage.INIT] == 3 * DEADLINES[Stage.STORE] == 12.0


def test_what_a_round_costs_a_gpu() -> None:
    """Each size's repetitions, with two to warm up and one to verify; one of anything else."""
    plan = RoundPlan(
        epoch=0, kind=RoundKind.PAIR, backend=Backend.NCCL, members=("a", "b"), digest="",
        steps=((8, 40), (1024, 5)),
    )  # fmt: skip
    timings = [Timing("all_reduce", size, 0.5, 1.0) for size in (8, 1024, 2048)]
    assert gpu_seconds(plan, timings) == 0.5 * (43 + 8 + 4)
