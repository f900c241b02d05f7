"""How often probes accuse anything in a healthy cluster: days without a fault.

    python -m bench.probe_days [--nodes 128] [--leaf-size 16] [--days 5] [--seeds 101 119]
    [--processes 2]

One cluster of `probe_simulator` for each seed, so many days each, `compiled`: a day of 128 nodes
takes some three minutes of one core.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import probe_simulator
from bench.compiled import compile_into, run_in
from bench.probe_simulator import Cluster, Conditions, heading, quiet
from dshealthd.probe.verdicts import detector

JITTER, SPIKES = 0.015, 0.005
SURE = 0.95


def simulate(nodes: int, leaf_size: int, days: float, seed: int) -> None:
    """Print the row of one seed; `mypyc` has compiled what is imported here."""
    for module in (probe_simulator, detector):
        if not str(module.__file__).endswith(".so"):
            message = f"{module.__file__} is not compiled"
            raise RuntimeError(message)
    cluster = Cluster(nodes, leaf_size, Conditions(JITTER, SPIKES), seed)
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    begun = time.process_time()
    accused, paging = quiet(cluster, days)
    names = Counter(f"{found.part} {found.reason}" for _, on, found, _ in cluster.log if on)
    print(
        f"| {seed} | {nodes} | {days:g} | {cluster.rounds} | {cluster.extra / cluster.rounds:.1%} "
        f"| {accused} | {paging} | {dict(names) or '-'} | {time.process_time() - begun:.0f} |",
        flush=True,
    )


def main() -> None:
    """Compile, run all seeds in processes of their own, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--leaf-size", type=int, default=16)
    parser.add_argument("--days", type=float, default=5.0, help="of each seed")
    parser.add_argument("--seeds", type=int, nargs=2, default=[101, 119], help="first and last")
    parser.add_argument("--processes", type=int, default=2, help="at once")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds[0], arguments.seeds[1] + 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.processes) as pool:
        compile_into(Path(folder))

        def run(seed: int) -> None:
            shape = arguments.nodes, arguments.leaf_size, arguments.days, seed
            run_in(Path(folder), f"from bench.probe_days import simulate; simulate(*{shape})")

        heading(
            "seed",
            "nodes",
            "days",
            "rounds",
            "extra rounds",
            "accusations",
            "lasting 60 s",
            "which",
            "CPU s",
        )
        sys.stdout.flush()
        list(pool.map(run, seeds))
    total = arguments.days * len(seeds)
    print(
        f"\n{total:g} days. With no accusation that lasts, fewer than one in "
        f"{total / -math.log(1 - SURE):.0f} days at {SURE:.0%} confidence."
    )


if __name__ == "__main__":
    main()
