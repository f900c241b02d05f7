"""How often probes accuse anything in a healthy cluster: days without a fault.

    python -m bench.probe_days [--nodes 128] [--leaf-size 16] [--days 5] [--seeds 101 119]
    [--processes 2]

One cluster of `probe_simulator` for each seed, so many days each. A day of 128 nodes takes six to
ten minutes of one core in Python; mypyc, of mypy's package, compiles the simulator and the modules
that decide into a folder of their own first, which halves that. The figures are the same to the
last digit. It needs a C compiler and Python's headers.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import probe_simulator
from bench.probe_simulator import Cluster, Conditions, heading, quiet
from dshealthd.probe.verdicts import detector

ROOT = Path(__file__).parents[1]
COMPILED = (
    "dshealthd/probe/verdicts/*.py",
    "dshealthd/probe/observation.py",
    "dshealthd/probe/members/schedule.py",
    "bench/probe_simulator.py",
)
JITTER, SPIKES = 0.015, 0.005
SURE = 0.95
_SETUP = """\
from glob import glob
from mypyc.build import mypycify
from setuptools import setup
files = sorted(file for pattern in {patterns!r} for file in glob(pattern))
setup(name="compiled", packages=[], ext_modules=mypycify(files, opt_level="3"))
"""


def compile_into(folder: Path) -> None:
    """Copy the packages to a folder, and compile there what a simulated day runs."""
    for package in ("dshealthd", "bench"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (folder / "setup.py").write_text(_SETUP.format(patterns=COMPILED), encoding="utf-8")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        check=True,
        stdout=sys.stderr,
    )


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
            subprocess.run(
                [sys.executable, "-c", f"from bench.probe_days import simulate; simulate{shape}"],
                env={**os.environ, "PYTHONPATH": folder},
                cwd=folder,
                check=True,
            )

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
