"""From fault to page: seconds from a fault in the lab until Alertmanager's webhook has come.

Prometheus and Alertmanager as shipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.processes import table
from tests.lab.catalogue import FAULTS
from tests.lab.node import Node
from tests.lab.paging import Paging
from tests.lab.receiver import FIRING

# In a wave each fault has a node and a symptom of its own; in a round, those of the same symptom
# are on different nodes.
WAVES = (
    ("gpu-lost", "ecc", "nvlink-down", "disk-full"),
    ("xid-79", "row-remap", "infiniband-down", "path-hang"),
    ("gpu-missing", "thermal", "nvml-hang", "open-files"),
    ("node-dead",),
)
NODES = max(map(len, WAVES))
OPEN = ("gpu-lost", "ecc", "nvlink-down", "disk-full")
"""Faults of the symptoms of all hard ones."""
PATIENT = {
    "disk-full": "nearly full for two minutes",
    "infiniband-down": "down for 30 s",
    "path-hang": "write test once a minute, deadline 5 s, hung for 30 s",
    "thermal": "most of a minute, for 30 s",
    "nvml-hang": "deadline 10 s, hung for 20 s",
    "open-files": "a ticket: collected for 15 s",
    "node-dead": "three scrapes, for 15 s",
}
"""Faults that the rules do not believe at first sight, as each may pass by itself, and what they
wait for. All others are certain at once: the hard faults.
"""
COMES = 180.0
REST = 20.0
"""Seconds after a wave in which its faults' own metrics return to normal.

Their alerts go on firing for as long as `keep_firing_for` says; that is of other symptoms than
those that come next on a node.
"""
SETTLE = 70.0
"""Seconds after which rules that are evaluated once a minute have been."""
STAGGER = 10.0
"""The faults of a wave begin within so many seconds: at any phase of scrapes and evaluations."""


def rename(lab: Paging, number: int, *, together: bool) -> None:
    """Make each node, or all `together`, a cluster that nobody has been told of, and wait until
    Prometheus knows of it what it needs.

    What comes to a symptom within a quarter of an hour of its last alert joins that message's
    group, and waits for group_interval.
    """
    entries = json.loads(lab.targets.read_text(encoding="utf-8"))
    for entry in entries:
        alone = "" if together else f"{entry['labels']['node']}, "
        entry["labels"]["cluster"] = f"{alone}round {number}"
    new = lab.targets.with_suffix(".new")
    new.write_text(json.dumps(entries), encoding="utf-8")
    new.replace(lab.targets)
    time.sleep(SETTLE)


def wave(
    lab: Paging, names: tuple[str, ...], nodes: list[Node], seconds: dict[str, list[float]]
) -> None:
    """Inject the faults of a wave, one on each node, note how long each page takes, and rest."""
    begins: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for name, node in zip(names, nodes, strict=False):
            time.sleep(random.uniform(0, STAGGER / len(names)))
            begins[name] = time.monotonic()
            stack.enter_context(FAULTS[name].inject(lab, node))

        def page(name: str) -> float | None:
            node = nodes[names.index(name)]
            for alert in lab.receiver.told(since=begins[name]):
                if alert.status == FIRING and FAULTS[name].names(alert, node):
                    return alert.received
            return None

        lab.receiver.wait(lambda: all(page(name) is not None for name in names), COMES)
        for name in names:
            came = page(name)
            seconds.setdefault(name, []).append(
                float("inf") if came is None else came - begins[name]
            )
            print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    time.sleep(REST)


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return (
        statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    )


def run(rounds: int, *, as_shipped: bool, beside: bool, hard: bool) -> None:
    """Print the table of one kind of agents; with pages of each symptom open `beside`, on other
    nodes of one cluster.
    """
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        Paging(
            Path(directory),
            NODES + beside * len(OPEN),
            gpus=8,
            as_shipped=as_shipped,
            training=True,
        ) as lab,
    ):
        lab.until_watched()
        for number in range(rounds):
            rename(lab, number, together=beside)
            nodes = random.sample(lab.lab.nodes, NODES + beside * len(OPEN))
            with contextlib.ExitStack() as stack:
                for name, node in zip(OPEN, nodes[NODES:], strict=False):
                    stack.enter_context(FAULTS[name].inject(lab, node))
                time.sleep(SETTLE if beside else 0.0)
                nodes = nodes[:NODES]
                for turn, every in enumerate(WAVES):
                    names = tuple(name for name in every if not hard or name not in PATIENT)
                    wave(lab, names, nodes[turn:] + nodes[:turn], seconds)
    rows: list[list[object]] = [
        [name, len(found), statistics.median(found), p95(found), max(found), PATIENT.get(name, "")]
        for name, found in seconds.items()
    ]
    pool = [value for name, found in seconds.items() if name not in PATIENT for value in found]
    rows.append(["hard faults", len(pool), statistics.median(pool), p95(pool), max(pool), ""])
    print(f"{'Agents as shipped' if as_shipped else 'Agents that sample every second'}\n")
    print(table(["fault", "runs", "median s", "p95 s", "max s", "waits for"], rows), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=2, help="times that each fault is injected (%(default)s)"
    )
    parser.add_argument(
        "--agents",
        choices=["shipped", "quick", "both"],
        default="both",
        help="how agents sample (%(default)s)",
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="have a page of each hard fault's symptom open, on other nodes of one cluster",
    )
    parser.add_argument("--hard", action="store_true", help="the hard faults only")
    options = parser.parse_args()
    for as_shipped in (False, True):
        if options.agents in {"both", "shipped" if as_shipped else "quick"}:
            run(options.rounds, as_shipped=as_shipped, beside=options.open, hard=options.hard)


if __name__ == "__main__":
    main()
