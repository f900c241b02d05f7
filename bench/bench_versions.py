r"""CPU, memory and scrapes of this checkout's agent beside those of another checkout's.

    python -m bench.bench_versions CHECKOUT [--ticks 24] [--scrapes 100]

CHECKOUT has a `.venv` with its own dependencies. Both agents run at once and as shipped, on the
same eight simulated GPUs, and then without any. They are scraped in turn, every 50 ms (where few
scrapes find new results) and every three seconds (where all do, as those of Prometheus). The
collector `training` is off in both, as one agent alone can have its socket.

What else runs is work for both: its processes, connections and jobs are looked at. As root, apart
from it and on one CPU:

    unshare --pid --fork --mount-proc --net sh -c \
        'ip link set lo up; exec taskset -c 1 python -m bench.bench_versions CHECKOUT'
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path

from bench.bench_agent import INTERVAL, measure
from bench.bench_memory import sizes
from bench.processes import Server, agent, median, table
from tests.nvml.simulator import Simulator

PAUSES = {"again": 0.05, "after 3 s": 3.0}
"""Seconds between two scrapes that are timed, by the words for them."""
SETTLING = 0.002
"""Seconds until an agent has ended all that a scrape made it do."""
CONFIG = "[collectors.training]\nenabled = false\n"


def scrapes(servers: list[Server], count: int, pause: float) -> dict[str, tuple[float, float, int]]:
    """Return latency and CPU of a scrape in milliseconds, medians, and the number of series.

    Scraped in turn, as often as `count` says, the one that comes first in turn as well.
    """
    found: dict[str, list[tuple[float, float]]] = {server.name: [] for server in servers}
    series: dict[str, int] = {}
    for turn in range(count):
        time.sleep(pause)
        for server in servers if turn % 2 else reversed(servers):
            before, began = server.cpu(), time.perf_counter()
            text = server.scrape()
            took = time.perf_counter() - began
            time.sleep(SETTLING)
            found[server.name].append((1000 * took, 1000 * (server.cpu() - before)))
            series[server.name] = sum(
                not line.startswith(b"#") for line in text.splitlines() if line
            )
    return {
        name: (*(median(column) for column in zip(*rows, strict=True)), series[name])  # type: ignore[misc] # three of them
        for name, rows in found.items()
    }


def compared(old: Server, new: Server, ticks: int, count: int) -> list[list[object]]:
    """Return the rows of what two agents cost that run side by side."""
    measure([old, new], 1)  # until all workers have started, and do the same again and again
    before = {one.name: one.cpu_by_process() for one in (old, new)}
    began = time.monotonic()
    spent = measure([old, new], ticks)
    took = time.monotonic() - began
    by_process = [
        [
            1000 * (cpu - before[one.name][pid]) / took
            for pid, cpu in one.cpu_by_process().items()
            if pid in before[one.name]
        ]
        for one in (old, new)
    ]
    rows: list[list[object]] = [
        _row("CPU, ms a second, median", *(median(spent[one.name]) for one in (old, new))),
        _row("CPU, ms a second, mean", *(sum(spent[x.name]) / ticks for x in (old, new))),
    ]
    for number, (was, now) in enumerate(zip(*by_process, strict=False)):
        who = f"worker {number}" if number else "agent"
        rows.append(_row(f"CPU, ms a second, {who}", was, now))
    memory = [[sizes(pid) for pid in one.tree()] for one in (old, new)]
    rows += [
        _row("PSS of all processes, MiB", *(sum(pss for pss, _ in one) for one in memory)),
        _row("private memory of all, MiB", *(sum(own for _, own in one) for one in memory)),
        _row("private memory of the agent alone, MiB", *(one[0][1] for one in memory)),
    ]
    for words, pause in PAUSES.items():
        scraped = scrapes([old, new], count, pause)
        for number, what in enumerate((f"scrape {words}, ms", f"CPU of a scrape {words}, ms")):
            rows.append(_row(what, *(scraped[one.name][number] for one in (old, new))))
    rows.append(_row("series", *(float(scraped[one.name][2]) for one in (old, new))))
    return rows


def _row(what: str, old: float, new: float) -> list[object]:
    return [what, old, new, new / old]


def main() -> None:
    """Print a table with GPUs and one without."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ticks", type=int, default=24, help=f"of {INTERVAL:g} s each")
    parser.add_argument("--scrapes", type=int, default=100)
    arguments = parser.parse_args()
    other = str(arguments.checkout / ".venv/bin/python")
    for gpus in (8, 0):
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config = CONFIG
            if gpus:
                simulator = Simulator(directory, gpus)
                simulator.pci_sysfs(directory / "sys")
                os.environ.update(simulator.environment())
                config += f'[path]\nsysfs = "{directory / "sys"}"\n'
            old = stack.enter_context(agent(config, "old", other))
            new = stack.enter_context(agent(config, "new"))
            rows = compared(old, new, arguments.ticks, arguments.scrapes)
            for name in simulator.environment() if gpus else ():
                del os.environ[name]
        print(f"{gpus} simulated GPUs, {arguments.ticks} ticks of {INTERVAL:g} s\n")
        print(table(["", "other checkout", "this one", "ratio"], rows), flush=True)


if __name__ == "__main__":
    main()
