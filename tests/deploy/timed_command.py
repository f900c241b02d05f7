"""`dshealthd`, with a note of how long it took, less what other work took: for Slurm's programs.

`timed_command.py FILE ARGUMENTS…` adds a line to FILE: the seconds since this process began, less
those for which it was ready to run and had no CPU (schedstat). Bounds are on the program, and a
machine with other work starts Python in seconds.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path


def seconds() -> float:
    """Return for how long this process has run or slept."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    passed = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return passed - int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


if __name__ == "__main__":
    place = sys.argv.pop(1)
    try:
        runpy.run_module("dshealthd", run_name="__main__", alter_sys=True)
    finally:
        with open(place, "a", encoding="ascii") as file:
            file.write(f"{seconds():.2f}\n")
