"""A healthy lab, for long: `python -m tests.lab.healthy` ends with status 1 if anybody is told of anything.

The agents run as shipped and probe each other; Prometheus and Alertmanager are the shipped ones. Only the Watchdog may speak, and has to.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.paging import Paging

PERIOD = 10.0
"""Seconds from one probe to the next, as shipped."""
SILENT = 130.0
"""Seconds after which a Watchdog that is sent every minute is missed."""


def main() -> int:
    """Watch, and say what came."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.healthy", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long (%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (%(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="simulated GPUs of each (%(default)s)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        Paging(Path(directory), options.nodes, gpus=options.gpus, as_shipped=True, period=PERIOD) as lab,
    ):
        if lab.lab.limits:
            sys.exit("; ".join(lab.lab.limits))
        lab.until_watched()
        seconds = 60 * options.minutes
        begin = time.monotonic()
        lab.receiver.wait(lambda: bool(lab.receiver.told()), seconds)
        end = time.monotonic()
        told = lab.receiver.told()
        heard = [note.received for note in lab.receiver.notifications if note.receiver == "watchdog"]
        gap = max(later - earlier for earlier, later in itertools.pairwise([begin, *(time for time in heard if time > begin), end]))
        print(f"{options.nodes} nodes with {options.gpus} GPUs for {(end - begin) / 60:.1f} minutes: {len(told)} pages and tickets")
        print(f"{len(heard)} Watchdogs, at most {gap:.0f} s between two")
        for alert in told:
            print(f"  {alert}: {alert.annotations.get('description', '')}")
        return 1 if told or gap > SILENT else 0


if __name__ == "__main__":
    sys.exit(main())
