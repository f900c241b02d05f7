"""Where the time of a training went: its parts, and the report that rank 0 prints at its exit.

All is derived from what a heartbeat counts anyway.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.training.message import DeviceMemory, Totals

PARTS = {
    "work": "own work",
    "wait": "waiting for other ranks",
    "input": "input",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "compile": "compiling",
    "other": "other marked pauses",
    "hung": "hung or suspended",
    "start": "start, until the first step has ended",
    "restart": "restarts, until the first step has ended",
    "repeated": "steps that an earlier attempt had made",
    "unmeasured": "not measured",
}
"""The parts of a rank's time in words. Each second is in one of them."""
RANKS = {
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_NTASKS",
}
"""Each launcher's variables of a rank and of the number of ranks, as the agent reads them."""
LACKS = {
    "work": "own work and waits are not told apart: no wait for other ranks was seen",
    "input": "input is within own work: the model is not followed",
    "checkpoint": "no checkpoint was marked: one is within input or own work",
}
"""What is said where a part is not measured."""


def divide_time(
    seconds: float, steps: int, totals: Totals | None, inputs: float | None, *, alone: bool
) -> dict[str, float]:
    """Divide the seconds in which a rank made so many `steps` into own work, waits and input.

    `totals` are of the steps that were measured; the others, as those with a marked pause, took as
    long. `inputs` are the seconds that the input of a step took. A rank that is `alone` waits for
    none. What is left is unmeasured.
    """
    found = {}
    rest = seconds
    if totals is not None and totals.steps > 0 and totals.work_seconds + totals.wait_seconds > 0:
        measured = totals.work_seconds + totals.wait_seconds
        # Never more than there is: a device is some steps late, and a clock is read a moment later.
        scale = min(max(steps / totals.steps, 1.0), seconds / measured)
        found["work"] = scale * totals.work_seconds
        found["wait"] = scale * totals.wait_seconds
        rest = max(seconds - scale * measured, 0.0)
    elif alone:
        found["work"], rest = seconds, 0.0
    if inputs is not None:
        # It is a part of what the rank does itself.
        within = found.get("work", seconds)
        found["input"] = min(inputs * steps, within)
        if "work" in found:
            found["work"] -= found["input"]
        else:
            rest = max(rest - found["input"], 0.0)
    return {**found, "unmeasured": rest}


def table_lines(times: Mapping[str, float]) -> list[str]:
    """Return the table of the parts, which add up to the whole, and what was not measured."""
    whole = sum(times.values())
    if whole <= 0:
        return ["no time is known"]
    rows = [
        f"{words:42}{seconds / whole:7.1%}"
        for part, words in PARTS.items()
        if (seconds := times.get(part, 0.0)) or part in {"work", "wait", "input"} & times.keys()
    ]
    return rows + [says for part, says in LACKS.items() if part not in times]


def launched() -> tuple[str, str] | None:
    """Return the rank that the launcher gave this process, and of how many; None without one."""
    for rank, size in RANKS.items():
        # sbatch sets no number of tasks where none is asked for
        if rank in os.environ and (size in os.environ or rank == "SLURM_PROCID"):
            return os.environ[rank], os.environ.get(size) or "1"
    return None


def place() -> tuple[str, str]:
    """Return the rank of this process, and of how many; 0 of 1 without a launcher."""
    return launched() or ("0", "1")


def age() -> float:
    """Return the seconds since this process was started."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def show(times: Mapping[str, float], steps: int, memory: DeviceMemory | None) -> None:
    """Print the report of this rank on standard error."""
    head = f"dshealthd: {steps} steps of rank 0 in {sum(times.values()):.0f} s"
    report = [f"{head}; `dshealthd jobs --members --report JOB` has all ranks", *table_lines(times)]
    if memory is not None:
        report.append(f"memory at its highest: {memory.peak / (1 << 30):.1f} GiB")
    sys.stderr.write("\n  ".join(report) + "\n")
