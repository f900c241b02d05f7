"""CPU and memory of the whole agent, workers included, against node_exporter.

Both run and are scraped at the same times.
"""

from __future__ import annotations

import argparse
import os
import time

from bench.processes import Server, agent, median, node_exporter, sleepers, table

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


def main() -> None:
    """Print CPU for two numbers of processes, and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ticks", type=int, default=24, help="measured scrapes of 5 s for each number of processes"
    )
    ticks = parser.parse_args().ticks
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
