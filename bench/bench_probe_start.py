"""Time and CPU to the first all-reduce of a round, and memory held.

Workers forked from a warm parent against workers started afresh.

Both run the same worker on the same store over gloo on 127.0.0.1; what differs is whether torch is
imported once or by every worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.processes import memory as memory_of
from bench.processes import table
from dshealthd.probe.observation import Outcome, Stage
from dshealthd.probe.workers import worker
from dshealthd.probe.workers.job import RankSpec, WorkerJob
from dshealthd.probe.workers.store import LocalStore
from dshealthd.probe.workers.worker_pool import WorkerPool
from tests.processes import children

AFRESH = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("worker", {path!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
worker.threads = lambda: 2  # forbids the fork
if __name__ == "__main__":
    worker.main(sys.argv[1:])
"""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """Milliseconds of every round, and MiB."""

    first: list[float] = field(default_factory=list)
    """To the first all-reduce, by all ranks."""
    whole: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Of the workers, the parent and the agent together."""
    memory: list[float] = field(default_factory=list)
    """Of each worker's own, shared with no other process, at its first all-reduce."""


def cpu(pid: int) -> float:
    """Return the CPU milliseconds of a process, its reaped children, and this process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return 1000 * (sum(map(int, fields[11:15])) / TICK + time.process_time())


async def measure(worker_pool: WorkerPool, world: int, rounds: int) -> Measured:
    """Run rounds and return what they took; the first one, which starts the parent, is left out."""
    rank_specs = tuple(RankSpec(rank=rank) for rank in range(world))
    job = WorkerJob(
        backend="gloo",
        world_size=world,
        rank_specs=rank_specs,
        address="127.0.0.1",
        steps=((8, 10),),
        warm_up=1,
        deadlines=dict.fromkeys(Stage, 60.0),
    )
    result = Measured()
    for number in range(rounds + 1):
        connected: list[float] = []
        memory: list[float] = []
        started = time.perf_counter()

        def progress(
            _rank: int,
            stage: Stage,
            connected: list[float] = connected,
            memory: list[float] = memory,
            number: int = number,
        ) -> None:
            if stage is Stage.WARM_UP:
                connected.append(time.perf_counter())
                parent = worker_pool.about["ready"]
                if number == rounds and len(connected) == world:
                    held = map(memory_of, children(parent))
                    memory += [one["Private_Clean"] + one["Private_Dirty"] for one in held]

        before = cpu(worker_pool.about["ready"]) if worker_pool.ready else 0.0
        ranks = await worker_pool.run(job, LocalStore(), progress)
        ended = time.perf_counter()
        failed = [rank for rank in ranks if rank.outcome is not Outcome.OK]
        if failed:
            raise SystemExit(str(failed))
        if number:
            result.first.append(1000 * (max(connected) - started))
            result.whole.append(1000 * (ended - started))
            result.cpu.append(cpu(worker_pool.about["ready"]) - before)
            result.memory += memory
    return result


async def compare(worlds: list[int], rounds: int, program: str) -> None:
    """Measure both ways at every world size and print the tables."""
    warm = WorkerPool(sys.executable, 600.0, time.monotonic)
    afresh = WorkerPool(sys.executable, 600.0, time.monotonic, program=program)
    rows: list[list[object]] = []
    try:
        for world in worlds:
            a = await measure(warm, world, rounds)
            b = await measure(afresh, world, max(3, rounds // 6))
            first, other = median(a.first), median(b.first)
            rows.append(
                [
                    world,
                    first,
                    other,
                    first / other,
                    median(a.whole),
                    median(b.whole),
                    median(a.cpu),
                    median(b.cpu),
                    median(a.memory),
                    median(b.memory),
                ]
            )
        print(f"Milliseconds, medians of {rounds} rounds\n")
        head = [
            "ranks",
            "first all-reduce, forked",
            "afresh",
            "ratio",
            "whole round, forked",
            "afresh",
            "CPU, forked",
            "afresh",
        ]
        print(table([*head, "MiB per worker, forked", "afresh"], rows))
        print(
            f"The parent holds {memory_of(warm.about['ready'])['Pss']:.0f} MiB (PSS) "
            "between rounds, until it is idle."
        )
    finally:
        await warm.close()
        await afresh.close()


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=30,
        help="rounds from the warm parent at each world size; a sixth of it afresh",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="world sizes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "afresh.py")
        program.write_text(AFRESH.format(path=worker.__file__), encoding="utf-8")
        asyncio.run(compare(arguments.ranks, arguments.rounds, str(program)))


if __name__ == "__main__":
    main()
