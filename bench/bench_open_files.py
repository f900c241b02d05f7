"""CPU time of finding the process nearest to its descriptor limit, with 600 processes and 100,000
descriptors more than there are.

    python -m bench.bench_open_files [--processes 600] [--descriptors 100000] [--rounds 15]

In one run, turn by turn: the collector's own count of all processes; its whole sweep, in between
and at a full count; the same count in C (`open_files_floor.c`, needs a compiler); psutil; and the
directory listing that kernels before 6.2 need. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from dshealthd.collectors.open_files import OpenFiles
from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.result import attempt
from dshealthd.jobs.processes import YOUNG
from dshealthd.linux.process_limits import Descriptors

FLOOR = Path(__file__).with_name("open_files_floor.c")


@contextmanager
def crowd(processes: int, descriptors: int) -> Iterator[None]:
    """Hold so many descriptors in so many sleeping children; end them afterwards."""
    children = []
    try:
        for number in range(processes):
            share = descriptors * (number + 1) // processes - descriptors * number // processes
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                source = os.open(os.devnull, os.O_RDONLY)
                for _ in range(share - 1):
                    os.dup(source)
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, os.WUNTRACED)
        time.sleep(YOUNG + 0.5)  # what is younger is looked at twice
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def timed(call: Callable[[], object]) -> float:
    """Return the CPU milliseconds of this process that a call takes."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def pids() -> list[str]:
    """List the processes."""
    return [name for name in os.listdir("/proc") if name.isdecimal()]


def by_psutil() -> None:
    """Count with psutil."""
    for process in psutil.process_iter():
        try:
            _ = process.num_fds(), process.rlimit(psutil.RLIMIT_NOFILE)
        except psutil.Error:
            continue


def by_listing() -> None:
    """Count by listing the directories."""
    for pid in pids():
        try:
            len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue


class Sweeps:
    """The collector as the agent runs it, with a clock that decides when it counts everything."""

    def __init__(self) -> None:
        self.now = 0.0
        self.context = Context(host=Host(), monotonic=lambda: self.now, wall=time.time)
        self.collector = OpenFiles(OpenFiles.Options(full_interval=Duration(60)), self.context)
        self.sweep(0)

    def sweep(self, seconds: float) -> None:
        """Collect once, so many seconds after the last time."""
        self.now += seconds
        self.context.sweep += 1
        attempt(self.collector, self.context.monotonic)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=600)
    parser.add_argument("--descriptors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, crowd(options.processes, options.descriptors):
        floor = Path(folder) / "floor"
        compiler = shutil.which("cc")
        if compiler is not None:
            subprocess.run([compiler, "-O2", "-o", floor, FLOOR], check=True)
        descriptors, sweeps = Descriptors(Host()), Sweeps()
        ways: dict[str, Callable[[], object]] = {
            "dshealthd, all processes": lambda: descriptors.worst(pids()),
            "dshealthd, sweep with a full count (once a minute)": lambda: sweeps.sweep(61),
            "dshealthd, sweep in between": lambda: sweeps.sweep(1),
            "listing /proc/pid/fd (Linux before 6.2)": by_listing,
            "psutil num_fds + rlimit": by_psutil,
        }
        times: dict[str, list[float]] = {"C floor": [], **{way: [] for way in ways}}
        found = ""
        for _ in range(options.rounds):
            if compiler is not None:
                found = subprocess.run(
                    [floor, "3"], check=True, capture_output=True, text=True
                ).stdout
                times["C floor"].append(
                    statistics.median(float(line.split()[0]) for line in found.splitlines())
                )
            for way, call in ways.items():
                times[way].append(timed(call))
        count = f"{len(pids())} processes, {read_open_files()} open files"
    print(
        f"{count}; CPU ms, median of {options.rounds} rounds; direct count: {descriptors.direct}\n"
    )
    print("| way | median ms | min | max | ratio to C |\n|---|---:|---:|---:|---:|")
    base = statistics.median(times["C floor"]) if times["C floor"] else None
    for way, values in times.items():
        if values:
            median = statistics.median(values)
            ratio = f"{median / base:.2f}" if base else "-"
            print(f"| {way} | {median:.2f} | {min(values):.2f} | {max(values):.2f} | {ratio} |")


def read_open_files() -> str:
    """Return the descriptors of all processes together, which psutil counts."""
    total = 0
    for process in psutil.process_iter():
        try:
            total += process.num_fds()
        except psutil.Error:
            continue
    return str(total)


if __name__ == "__main__":
    main()
