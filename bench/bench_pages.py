"""From fault to page: seconds from a fault in the lab until Alertmanager's webhook has come; Prometheus and Alertmanager as shipped."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.processes import table
from tests.lab.catalogue import FAULTS
from tests.lab.paging import Paging
from tests.lab.receiver import FIRING

# In a wave each fault has a node and a symptom of its own.
WAVES = (
    ("gpu-lost", "ecc", "nvlink-down", "disk-full"),
    ("xid-79", "row-remap", "infiniband-down", "path-hang"),
    ("gpu-missing", "thermal", "nvml-hang", "open-files"),
    ("node-dead",),
)
NODES = max(map(len, WAVES))
COMES, GOES = 90.0, 180.0
STAGGER = 10.0
"""The faults of a wave begin within so many seconds: at any phase of scrapes and evaluations."""


def rename(lab: Paging, cluster: str) -> None:
    """Make the lab another cluster, so that nobody has been told of any symptom of it.

    What comes to a symptom within a quarter of an hour of its last alert joins that message's group, and waits for group_interval.
    """
    entries = json.loads(lab.targets.read_text(encoding="utf-8"))
    for entry in entries:
        entry["labels"]["cluster"] = cluster
    new = lab.targets.with_suffix(".new")
    new.write_text(json.dumps(entries), encoding="utf-8")
    new.replace(lab.targets)
    end = time.monotonic() + COMES
    while not lab.prometheus.query(f'count(up{{cluster="{cluster}"}} == 1) == {NODES}'):
        if time.monotonic() > end:
            message = f"Prometheus does not scrape {lab.targets}"
            raise TimeoutError(message)
        time.sleep(0.5)


def wave(lab: Paging, names: tuple[str, ...], seconds: dict[str, list[float]]) -> None:
    """Inject the faults of a wave, note how long each page takes, and wait until all is over."""
    begins: dict[str, float] = {}
    nodes = random.sample(lab.lab.nodes, len(names))
    with contextlib.ExitStack() as stack:
        for name, node in zip(names, nodes, strict=True):
            time.sleep(random.uniform(0, STAGGER / len(names)))
            begins[name] = time.monotonic()
            stack.enter_context(FAULTS[name].inject(lab, node))

        def page(name: str) -> float | None:
            node = nodes[names.index(name)]
            for notification in list(lab.receiver.notifications):
                if notification.received >= begins[name] and notification.receiver == FAULTS[name].receiver:
                    for alert in notification.alerts:
                        if alert.status == FIRING and FAULTS[name].names(alert, node):
                            return notification.received
            return None

        lab.receiver.wait(lambda: all(page(name) is not None for name in names), COMES)
        for name in names:
            came = page(name)
            seconds.setdefault(name, []).append(float("inf") if came is None else came - begins[name])
    if not lab.receiver.wait(lambda: not lab.receiver.firing("page", "ticket"), GOES):
        message = f"not over: {list(map(str, lab.receiver.firing('page', 'ticket')))}"
        raise TimeoutError(message)


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def run(rounds: int, *, as_shipped: bool) -> None:
    """Print the table of one kind of agents."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, Paging(Path(directory), NODES, gpus=8, as_shipped=as_shipped) as lab:
        if lab.lab.limits:
            print("; ".join(lab.lab.limits))
            return
        lab.until_watched()
        clusters = 0
        for _ in range(rounds):
            for names in WAVES:
                clusters += 1
                rename(lab, f"cluster-{clusters}")
                wave(lab, names, seconds)
    rows: list[list[object]] = [[name, len(found), statistics.median(found), p95(found), max(found)] for name, found in seconds.items()]
    pool = [value for found in seconds.values() for value in found]
    rows.append(["all", len(pool), statistics.median(pool), p95(pool), max(pool)])
    print(f"{'Agents as shipped' if as_shipped else 'Agents that sample every second'}\n")
    print(table(["fault", "runs", "median s", "p95 s", "max s"], rows), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="times that each fault is injected (%(default)s)")
    parser.add_argument("--agents", choices=["shipped", "quick", "both"], default="both", help="how agents sample (%(default)s)")
    options = parser.parse_args()
    for as_shipped in (False, True):
        if options.agents in {"both", "shipped" if as_shipped else "quick"}:
            run(options.rounds, as_shipped=as_shipped)


if __name__ == "__main__":
    main()
