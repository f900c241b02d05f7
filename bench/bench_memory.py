"""Memory of an idle agent and its workers on a node with eight simulated GPUs.

What is private to a process is what another worker would cost; the rest is shared with processes
that run the same interpreter.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from bench.processes import Server, agent, table
from tests.nvml.simulator import Simulator

SETTLING = 40.0
"""Seconds in which each collector has run, those of a minute's interval once."""


def sizes(pid: int) -> tuple[float, float]:
    """Return the proportional and the private memory of a process, in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    private = kilobytes["Private_Clean:"] + kilobytes["Private_Dirty:"]
    return kilobytes["Pss:"] / 1024, private / 1024


def libraries(pid: int) -> str:
    """Tell the worker of devices from the others: it alone has NVML."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return "worker with NVML" if "libnvidia-ml" in maps else "worker"


def rows(server: Server) -> list[list[object]]:
    """Return a row a process, and their sum."""
    first, *others = server.tree()
    found = [("agent", *sizes(first)), *((libraries(pid), *sizes(pid)) for pid in others)]
    total = ("together", sum(row[1] for row in found), sum(row[2] for row in found))
    return [list(row) for row in (*found, total)]


def main() -> None:
    """Print the sizes."""
    with tempfile.TemporaryDirectory() as directory:
        gpus = Simulator(Path(directory), 8)
        sysfs = Path(directory, "sys")
        gpus.pci_sysfs(sysfs)
        os.environ.update(gpus.environment())
        with agent(f'[path]\nsysfs = "{sysfs}"\n') as server:
            server.scrape()
            time.sleep(SETTLING)
            server.scrape()
            print("MiB\n")
            print(table(["process", "PSS", "private"], rows(server)))


if __name__ == "__main__":
    main()
