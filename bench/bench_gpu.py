"""One sweep of eight simulated GPUs.

Agent and device worker, against the same calls of plain pynvml and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.processes import median, table
from dshealthd.collection.supervisor import Supervisor
from dshealthd.config import config, registry
from dshealthd.core.host import Host
from dshealthd.core.options import encode
from dshealthd.core.result import CollectionOutcome, Result
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    import collections


def cpu(pid: int) -> float:
    """Return the CPU milliseconds of a process."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e6


async def sweeps(
    environment: Simulator, names: list[str], rounds: int
) -> tuple[list[float], list[float], collections.Counter[str], int]:
    """Return agent's and worker's CPU milliseconds of each sweep, what one sweep calls, and how
    many samples it gives.
    """
    kinds = registry.all_collectors()
    options = {name: config.load(None).collectors[name] for name in names}
    hello = {
        "worker": "device",
        "host": encode(Host(sysfs=environment.directory / "sys")),
        "collectors": {name: encode(option) for name, option in options.items()},
        "log_level": 50,
    }
    deadlines = dict.fromkeys(names, 30.0)
    supervisor = Supervisor(
        "device",
        hello,
        deadlines,
        {name: registry.metrics(kinds[name]) for name in names},
        time.monotonic,
    )
    results: dict[str, Result] = {}
    for _ in range(3):
        await supervisor.collect(names, results.__setitem__)
    assert all(
        result.outcome in {CollectionOutcome.OK, CollectionOutcome.NOT_AVAILABLE}
        for result in results.values()
    ), results
    before = environment.calls()
    await supervisor.collect(names, results.__setitem__)
    calls = environment.calls() - before
    process = supervisor._process  # noqa: SLF001 - its CPU time is what is measured
    assert process is not None
    ours, workers = [], []
    for _ in range(rounds):
        mine, its = cpu(os.getpid()), cpu(process.child.pid)
        await supervisor.collect(names, results.__setitem__)
        await asyncio.sleep(0.02)
        ours.append(cpu(os.getpid()) - mine)
        workers.append(cpu(process.child.pid) - its)
    await supervisor.close()
    return ours, workers, calls, sum(len(result.samples) for result in results.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    everything = [
        name for name, kind in registry.all_collectors().items() if kind.worker == "device"
    ]
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as directory:
        gpus = Simulator(directory)
        gpus.watch()
        gpus.pci_sysfs(Path(directory) / "sys")
        os.environ.update(gpus.environment())
        for what, names in (("gpu (every 5 s)", ["gpu"]), ("all six (every 15 s)", everything)):
            ours, workers, calls, samples = asyncio.run(sweeps(gpus, names, rounds))
            command = [sys.executable, "-m", "bench.raw_nvml", str(rounds)]
            done = subprocess.run([*command, *names], capture_output=True, text=True, check=True)
            floor = median([float(line) for line in done.stdout.split()])
            agent, worker = median(ours), median(workers)
            rows.append(
                [
                    what,
                    samples,
                    sum(calls.values()),
                    floor,
                    worker,
                    agent,
                    worker / floor,
                    (worker + agent) / floor,
                ]
            )
    print(f"CPU ms of a sweep of 8 simulated GPUs, medians of {rounds}\n")
    print(
        table(
            [
                "collectors",
                "samples",
                "calls",
                "plain pynvml",
                "worker",
                "agent",
                "worker / plain",
                "both / plain",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
