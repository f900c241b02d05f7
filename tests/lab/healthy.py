"""A healthy lab, for long: `python -m tests.lab.healthy` ends with status 1 if anybody is told of
anything.

The agents run as shipped and probe each other; Prometheus and Alertmanager are the shipped ones.
Only the Watchdog may speak, and has to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.paging import Paging
from tests.lab.receiver import WATCHDOG_MISSED

PERIOD = 10.0
"""Seconds from one probe to the next, as shipped."""


def main() -> int:
    """Watch, and say what came."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.healthy", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long (%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (%(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="simulated GPUs of each (%(default)s)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        Paging(
            Path(directory), options.nodes, gpus=options.gpus, as_shipped=True, period=PERIOD
        ) as lab,
    ):
        if lab.lab.limits:
            sys.exit("; ".join(lab.lab.limits))
        lab.until_watched()
        seconds = 60 * options.minutes
        begin = time.monotonic()
        lab.receiver.wait(lambda: bool(lab.receiver.told()), seconds)
        minutes = (time.monotonic() - begin) / 60
        told, silence = lab.receiver.told(), lab.receiver.longest_silence(begin)
        print(
            f"{options.nodes} nodes with {options.gpus} GPUs for {minutes:.1f} minutes: "
            f"{len(told)} pages and tickets"
        )
        print(f"at most {silence:.0f} s without a Watchdog")
        for alert in told:
            print(f"  {alert}: {alert.annotations.get('description', '')}")
        return 1 if told or silence > WATCHDOG_MISSED else 0


if __name__ == "__main__":
    sys.exit(main())
