"""The probe's own workers over PyTorch's ProcessGroupNCCL and genuine NCCL, without arithmetic."""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dshealthd.core.timing import Backoff
from dshealthd.probe.observation import Outcome, Stage
from dshealthd.probe.workers.job import RankResult, RankSpec, WorkerJob
from dshealthd.probe.workers.store import LocalStore
from dshealthd.probe.workers.worker_pool import WorkerPool
from tests.nccl.job import LOOPBACK
from tests.nccl.pytorch import training
from tests.nccl.pytorch.wheel import Wheel

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(1800)]

PROGRAM = str(Path(__file__).with_name("pytorch") / "probe_worker.py")
LONG = {Stage.IMPORT: 300.0, **dict.fromkeys(list(Stage)[1:], 120.0)}
SHORT = {**LONG, Stage.WARM_UP: 6.0, Stage.SIZES: 6.0, Stage.VERIFY: 6.0}
"""For what goes wrong once the ranks have met."""
STEPS = ((8, 3), (65536, 3))


class Node:
    """The workers of one node with simulated GPUs."""

    def __init__(self, wheel: Wheel, folder: Path) -> None:
        """Make an environment with the wheel; nothing runs yet."""
        self.folder = folder
        self.control = folder / "control"
        self.control.write_bytes(bytes(mmap.PAGESIZE))
        venv.create(folder / "env", symlinks=True)
        packages = folder / "env/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages /= "site-packages"
        # Torch is the wheel's; all else that it imports is this environment's.
        for place in (*Path(sysconfig.get_path("purelib")).iterdir(), *wheel.folder.iterdir()):
            if place.name.startswith(("torch", "functorch")) and place.parent != wheel.folder:
                continue
            (packages / place.name).unlink(missing_ok=True)
            (packages / place.name).symlink_to(place)
        self.environment = {
            "LD_LIBRARY_PATH": wheel.environment()["LD_LIBRARY_PATH"],
            "NCCLSIM_CONTROL": str(self.control),
            **{name: value for name, value in LOOPBACK.items() if name != "NCCL_SOCKET_IFNAME"},
        }

    def gpus(self, state: int) -> None:
        """Say what the GPUs may do from now on."""
        with self.control.open("r+b") as file:
            file.write(struct.pack("=i", state))

    def rounds(self, *scenes: Callable[[WorkerPool], object]) -> None:
        """Play scenes with one nursery, and see that its processes leave nothing behind."""
        before = left_behind()

        async def main() -> None:
            pool = WorkerPool(
                str(self.folder / "env/bin/python"),
                600.0,
                time.monotonic,
                environment=self.environment,
                program=PROGRAM,
                backoff=Backoff(0.01, 0.01),
            )
            try:
                for scene in scenes:
                    await scene(pool)  # type: ignore[misc] # coroutines
            finally:
                await pool.close()

        asyncio.run(main())
        assert left_behind() == before


def left_behind() -> set[str]:
    """Return shared memory of NCCL, and processes that run the program."""
    found = {name for name in os.listdir("/dev/shm") if name.startswith("nccl-")}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if PROGRAM.encode() in words:
            found.add(f"process {pid}")
    return found


@pytest.fixture
def node(cuda_torch: Wheel, tmp_path: Path) -> Iterator[Node]:
    """Give a node of its own to each test; its GPUs are free at the end."""
    node = Node(cuda_torch, tmp_path)
    yield node
    node.gpus(training.FREE)


def job(*plans: str, **changes: object) -> WorkerJob:
    """Return a round over NCCL with a GPU and a plan for each rank; an empty plan is honest
    work.
    """
    rank_specs = tuple(
        RankSpec(rank=rank, device=f"cuda:{rank}", part=str(rank), adapter=plan)
        for rank, plan in enumerate(plans)
    )
    fields = {
        "backend": "nccl",
        "world_size": len(plans),
        "rank_specs": rank_specs,
        "address": "127.0.0.1",
        "steps": STEPS,
        "deadlines": LONG,
    }
    return WorkerJob(**{**fields, **changes})  # type: ignore[arg-type] # fields by name


async def goes_well(pool: WorkerPool, ranks: int, **changes: object) -> list[RankResult]:
    """Run a round that goes well on all ranks, and return its results."""
    results = await pool.run(job(*[""] * ranks, **changes), LocalStore(), lambda *_: None)
    assert [result.outcome for result in results] == [Outcome.OK] * ranks, results
    return results


def test_rounds(node: Node) -> None:
    """Round after round goes well from one parent, with communicators of its own each."""

    async def scene(pool: WorkerPool) -> None:
        for ranks in (2, 4, 2):
            results = await goes_well(pool, ranks)
            assert {timing.op for result in results for timing in result.timings} == {"all_reduce"}
            assert all(result.entered == result.left > 0 for result in results)

    node.rounds(scene)


def test_rails(node: Node) -> None:
    """The ranks of two rails meet in a communicator of their own each."""
    specs = tuple(
        RankSpec(
            rank=rank,
            device=f"cuda:{rank}",
            group=f"rail{rank % 2}",
            group_rank=rank // 2,
            group_size=2,
        )
        for rank in range(4)
    )
    node.rounds(lambda pool: goes_well(pool, 4, rank_specs=specs))


@pytest.mark.parametrize(
    ("plan", "reason"), [("stop", "stopped"), ("kill", "killed"), ("hang", "deadline")]
)
@pytest.mark.parametrize("stage", ["init", "sizes"])
def test_peer_is_lost(stage: str, plan: str, reason: str, node: Node) -> None:
    """A rank that is lost, in NCCL's own rendezvous or between collectives, is told from who waits
    for it, which is ended at its deadline; then a round goes well.
    """
    deadlines = SHORT if stage == "sizes" else {**LONG, Stage.INIT: 15.0}

    def note(rank: int, at: Stage) -> None:
        if stage == "sizes" and (rank, at) == (1, Stage.SIZES):
            node.gpus(training.HOLD)

    async def scene(pool: WorkerPool) -> None:
        lost = job("", f"stage:{stage}:{plan}", deadlines=deadlines)
        results = await pool.run(lost, LocalStore(), note)
        assert results[1].reason == reason, results
        assert results[0].outcome in {Outcome.HUNG, Outcome.INCONCLUSIVE}, results
        node.gpus(training.FREE)
        await goes_well(pool, 2)

    node.rounds(scene)


def test_driver_hangs(node: Node) -> None:
    """Collectives that never end, on all ranks, are named by their deadline."""

    async def scene(pool: WorkerPool) -> None:
        def note(_rank: int, stage: Stage) -> None:
            if stage is Stage.SIZES:
                node.gpus(training.HOLD)

        results = await pool.run(job("", "", deadlines=SHORT), LocalStore(), note)
        assert {result.outcome for result in results} <= {Outcome.HUNG, Outcome.INCONCLUSIVE}
        assert Outcome.HUNG in {result.outcome for result in results}, results
        assert {result.stage for result in results} <= {Stage.SIZES, Stage.VERIFY}

    node.rounds(scene)
