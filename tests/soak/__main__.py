"""`make soak`: run a node under faults, and print a verdict.

The same seed draws the same faults in the same order; how many there is time for depends on the
machine. Ctrl-C or SIGTERM ends the soak after the fault under way, with a verdict on what was seen.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from tests.soak.invariants import Record, is_quiet
from tests.soak.node import GPUS, Node, node

FAULTS = Path(__file__).with_name("faults.toml")
LOOK = 1.0
"""Seconds between two scrapes."""
SETTLE = 40.0
"""Seconds until a GPU that fails must be down: a verdict, and a sweep."""
RECOVER = 130.0
"""Seconds until all must be well again: the longest back-off (60 s), a deadline, two sweeps."""


def main() -> int:
    """Soak, report, and return 1 if something did not hold."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="which faults, in which order")
    arguments = parser.parse_args()
    catalogue = tomllib.loads(FAULTS.read_text())["fault"]
    dice, record, drawn = random.Random(arguments.seed), Record(), Counter[str]()
    end = time.monotonic() + 60 * arguments.minutes
    early: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: early.append(number))
    with tempfile.TemporaryDirectory(prefix="dshealthd-soak-") as directory:
        with node(Path(directory)) as made:
            until_well(made, record)
            # Without a quiet moment nothing can be judged.
            while time.monotonic() < end and record.quiet and not early:
                (entry,) = dice.choices(catalogue, [one["weight"] for one in catalogue])
                drawn[f"{entry['number']:2} {entry['name']}"] += 1
                print(f"{time.monotonic() - record.started:6.0f} s  {entry['name']}", flush=True)
                suffer(made, record, entry, dice)
                until_well(made, record)
                if made.agent.process.poll() is not None:
                    record.breach(f"the agent ended with {made.agent.process.returncode}")
                    break
            began = time.monotonic()
        if (took := time.monotonic() - began) >= 20:
            record.breach(f"the agent took {took:.0f} s to end")
    growth = record.growth()
    lasted = f"{(time.monotonic() - record.started) / 60:.1f} minutes"
    planned = f", ended early: {arguments.minutes:g} were planned" if early else ""
    print(f"\n{lasted}, seed {arguments.seed}{planned}")
    print(f"scrapes      {record.scrapes}, the slowest {record.slowest:.2f} s")
    print("\n".join(growth))
    print("\n".join(f"{count:5} x {name}" for name, count in sorted(drawn.items())))
    print("\n".join(["", *record.broken, "FAILED" if record.broken else "all invariants held"]))
    return 1 if record.broken else 0


def suffer(made: Node, record: Record, entry: dict[str, Any], dice: random.Random) -> None:
    """Have one fault, and watch the agent through it."""
    lasts = dice.uniform(*entry["seconds"])
    with made.fault(entry, dice) as down:
        whole = entry["action"] == "driver" or entry.get("gpus") == [0, 0]
        well = set() if whole else set(range(GPUS)) - down
        if entry["action"] == "nvml" and not entry["down"]:
            well = set()
        began = time.monotonic()
        seen: set[int] = set()
        while (gone := time.monotonic() - began) < max(lasts, SETTLE if down else 0.0):
            scrape = record.look(made.agent, well)
            if scrape is not None:
                ups = {gpu: scrape.all("dshealthd_gpu_up", gpu=str(gpu)) for gpu in down}
                seen |= {gpu for gpu, up in ups.items() if 0.0 in up}
            if gone >= lasts and seen == down:
                break
            time.sleep(LOOK)
        if seen != down:
            record.breach(f"{entry['name']}: GPUs {sorted(down - seen)} were not called down")


def until_well(made: Node, record: Record) -> None:
    """Wait until all GPUs and collectors are up, and note the agent's state."""
    since, end = time.time(), time.monotonic() + RECOVER
    while True:
        scrape = record.look(made.agent, set())
        if scrape is not None and is_quiet(scrape, since):
            record.rest(made.agent, scrape)
            return
        if time.monotonic() > end:
            failing = scrape.series.get("dshealthd_collector_failing") if scrape else None
            record.breach(f"not well again after {RECOVER:g} s: {failing}")
            return
        time.sleep(LOOK)


if __name__ == "__main__":
    sys.exit(main())
