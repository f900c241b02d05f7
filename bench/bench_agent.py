"""CPU and memory of the whole agent, workers included, against node_exporter.

Both run and are scraped at the same times. With `--job`, instead: the agent beside a job of eight
ranks, each with eight data loaders and 64 connections, and an agent without the collector
job_activity.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from bench.processes import Server, agent, median, node_exporter, sleepers, table

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERVAL = 5.0
WARM_UP = 4


def measure(servers: list[Server], ticks: int) -> dict[str, list[float]]:
    """Scrape all servers at every tick and return the CPU milliseconds per second of each, a value
    a tick.
    """
    spent: dict[str, list[float]] = {server.name: [] for server in servers}
    before = {server.name: server.cpu() for server in servers}
    for tick in range(WARM_UP + ticks):
        for server in servers:
            server.scrape()
        time.sleep(INTERVAL)
        for server in servers:
            now = server.cpu()
            if tick >= WARM_UP:
                spent[server.name].append(1000 * (now - before[server.name]) / INTERVAL)
            before[server.name] = now
    return spent


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


@contextlib.contextmanager
def job(what: str) -> Iterator[None]:
    """Keep the ranks of a job that `trains` or `hangs`, their data loaders and their
    connections.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
        for rank in range(8):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "8"}
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(server.getsockname()[1]), what],
                env={**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            stack.callback(os.killpg, process.pid, 9)
            assert process.stdout is not None
            process.stdout.readline()
        yield


def beside_a_job(ticks: int) -> None:
    """Print the CPU of an agent beside a job, and of one without the collector job_activity."""
    rows = []
    with agent("") as whole, agent("[collectors.job_activity]\nenabled = false\n") as less:
        for what in ("trains", "hangs"):
            with job(what):
                spent = measure([whole, dataclasses.replace(less, name="less")], ticks)
            mean, without = (sum(values) / len(values) for values in spent.values())
            rows.append((what, mean, without, mean - without))
    print(f"CPU ms per second, scrapes every {INTERVAL:g} s, mean of {ticks} ticks\n")
    print(table(["the job", "agent", "without job_activity", "difference"], rows))


def main() -> None:
    """Print CPU for two numbers of processes, and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ticks", type=int, default=24, help="measured scrapes of 5 s for each number of processes"
    )
    parser.add_argument("--job", action="store_true", help="beside a job instead")
    options = parser.parse_args()
    ticks = options.ticks
    if options.job:
        beside_a_job(ticks)
        return
    with agent("") as ours, node_exporter() as theirs:
        rows: list[list[object]] = []
        for extra in (0, 500):
            with sleepers(extra):
                spent = measure([ours, theirs], ticks)
                processes = sum(name.isdecimal() for name in os.listdir("/proc"))
            a, b = spent[ours.name], spent[theirs.name]
            mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
            rows.append(
                [
                    processes,
                    median(a),
                    median(b),
                    median(a) / median(b),
                    mean_a,
                    mean_b,
                    mean_a / mean_b,
                ]
            )
        print(f"CPU ms per second, sampling and scrape every {INTERVAL:g} s, {ticks} ticks\n")
        print(
            table(
                [
                    "processes",
                    "dshealthd median",
                    "node_exporter median",
                    "ratio",
                    "dshealthd mean",
                    "node_exporter mean",
                    "ratio",
                ],
                rows,
            )
        )
        memory = {server.name: server.pss() for server in (ours, theirs)}
        print("PSS in MiB\n")
        print(
            table(
                ["", "server", "workers", "together"],
                [[n, m["server"], m["workers"], sum(m.values())] for n, m in memory.items()],
            )
        )


if __name__ == "__main__":
    main()
