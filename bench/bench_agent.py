"""CPU, wake-ups and memory of the whole agent, workers included, against node_exporter.

Two agents, one without GPUs and one with eight simulated ones, and node_exporter run and are
scraped at the same times: alone, and beside a job of eight ranks with heartbeats. With
`--processes`, they run beside 500 more processes, too. With `--job`, instead: the agent beside a
job of eight ranks, each with eight data loaders and 64 connections, and an agent without the
collector job_activity.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.processes import Server, agent, memory, node_exporter, sleepers, table
from tests.nvml.simulator import Simulator

INTERVAL = 5.0
WARM_UP = 6
"""Ticks before the first that counts: collectors of a job's processes look every 15 s."""
RANKS = 8


class Spent(NamedTuple):
    """What one server spent per second."""

    cpu: list[float]
    """Milliseconds per second, a value a tick."""
    wakeups: float

    @property
    def mean(self) -> float:
        """The mean of the CPU's milliseconds per second."""
        return sum(self.cpu) / len(self.cpu)


def measure(servers: list[Server], ticks: int) -> dict[str, Spent]:
    """Scrape all servers at every tick, and return what each spent."""
    cpu: dict[str, list[float]] = {server.name: [] for server in servers}
    before = {server.name: server.cpu() for server in servers}
    woken: dict[str, int] = {}
    for tick in range(WARM_UP + ticks):
        if tick == WARM_UP:
            woken, began = {server.name: server.wakeups() for server in servers}, time.monotonic()
        for server in servers:
            server.scrape()
        time.sleep(INTERVAL)
        for server in servers:
            now = server.cpu()
            if tick >= WARM_UP:
                cpu[server.name].append(1000 * (now - before[server.name]) / INTERVAL)
            before[server.name] = now
    seconds = time.monotonic() - began
    return {
        server.name: Spent(cpu[server.name], (server.wakeups() - woken[server.name]) / seconds)
        for server in servers
    }


RANK = """
import os, socket, sys, time
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(64)]
for _ in range(8):
    if os.fork() == 0:
        time.sleep(3600)
print(flush=True)
while sys.argv[2] == "trains":
    time.sleep(0.05)
    sum(range(100_000))
connections[0].recv(1)
"""

HEARTBEATS = """
import sys, time
from dshealthd.training.heartbeat import Heartbeat
heartbeat = Heartbeat()
print(flush=True)
while True:
    heartbeat.step()
    time.sleep(float(sys.argv[1]))
"""


@contextlib.contextmanager
def ranks(program: str, *arguments: str) -> Iterator[None]:
    """Keep the ranks of a job that run `program`, which says when it is ready."""
    with contextlib.ExitStack() as stack:
        for rank in range(RANKS):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                env={**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            stack.callback(os.killpg, process.pid, 9)
            assert process.stdout is not None
            process.stdout.readline()
        yield


@contextlib.contextmanager
def job(what: str) -> Iterator[None]:
    """Keep the ranks of a job that `trains` or `hangs`, their data loaders and their
    connections.
    """
    with (
        socket.create_server(("127.0.0.1", 0), backlog=512) as server,
        ranks(RANK, str(server.getsockname()[1]), what),
    ):
        yield


def beside_a_job(ticks: int) -> None:
    """Print the CPU of an agent beside a job, and of one without the collector job_activity."""
    rows = []
    without = "[collectors.job_activity]\nenabled = false\n"
    with agent("") as whole, agent(without, "less") as less:
        for what in ("trains", "hangs"):
            with job(what):
                spent = measure([whole, less], ticks)
            mean, rest = (spent[server.name].mean for server in (whole, less))
            rows.append((what, mean, rest, mean - rest))
    print(f"CPU ms per second, scrapes every {INTERVAL:g} s, mean of {ticks} ticks\n")
    print(table(["the job", "agent", "without job_activity", "difference"], rows))


@contextlib.contextmanager
def agents() -> Iterator[list[Server]]:
    """Run an agent without GPUs and one with eight."""
    with tempfile.TemporaryDirectory() as directory:
        gpus = Simulator(Path(directory), 8)
        sysfs = Path(directory, "sys")
        gpus.pci_sysfs(sysfs)
        simulated = f'[path]\nsysfs = "{sysfs}"\n'
        with (
            agent("", "dshealthd, no GPU") as first,
            agent(simulated, "dshealthd, 8 GPUs", gpus.environment()) as second,
        ):
            yield [first, second]


def beside_node_exporter(ticks: int, *, processes: bool) -> None:
    """Print what both agents and node_exporter spend, alone and beside others."""
    rows: list[list[object]] = []
    sizes: list[list[object]] = []
    with agents() as ours, node_exporter() as theirs:

        def row(beside: str) -> None:
            spent = measure([*ours, theirs], ticks)
            other = spent[theirs.name]
            for name, own in spent.items():
                middle = median(own.cpu)
                ratios = own.mean / other.mean, middle / median(other.cpu)
                rows.append([beside, name, own.mean, ratios[0], middle, ratios[1], own.wakeups])

        def size(beside: str) -> None:
            for server in (*ours, theirs):
                found = [memory(pid) for pid in server.tree()]
                pss, rss = ([each[kind] for each in found] for kind in ("Pss", "Rss"))
                each = " + ".join(f"{value:.1f}" for value in pss)
                sizes.append([beside, server.name, each, sum(pss), sum(rss)])

        row("nothing")
        size("nothing")
        if processes:
            with sleepers(500):
                row("500 processes")
        with ranks(HEARTBEATS, "0.5"):
            row("8 ranks with heartbeats")
            size("8 ranks with heartbeats")
    print(f"CPU ms per second, sampling and scrape every {INTERVAL:g} s, {ticks} ticks\n")
    head = ["beside", "", "mean", "ratio", "median", "ratio", "wake-ups per second"]
    print(table(head, rows))
    print("Memory in MiB\n")
    print(table(["beside", "", "PSS by process", "PSS", "RSS"], sizes))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ticks", type=int, default=24, help="measured scrapes of 5 s a row")
    parser.add_argument("--processes", action="store_true", help="beside 500 processes, too")
    parser.add_argument("--job", action="store_true", help="beside a job instead")
    options = parser.parse_args()
    if options.job:
        beside_a_job(options.ticks)
    else:
        beside_node_exporter(options.ticks, processes=options.processes)


if __name__ == "__main__":
    main()
