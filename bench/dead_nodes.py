"""How soon agents name several nodes that die at once.

    python -m bench.dead_nodes [--seeds 20]

Simulated: the schedule, verdicts and network of `probe_simulator`. The nodes die at the start of an
epoch; a node counts as named when it is, or its leaf where all of that is dead.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection

from bench.probe_simulator import Cluster, Conditions, Fault, heading, quantile
from dshealthd.probe.observation import Outcome, Part
from dshealthd.probe.verdicts.accusation import AMBIGUOUS

CASES = ((8, 4, 2), (8, 4, 3), (32, 8, 2), (32, 8, 4), (32, 8, 0), (64, 8, 0))
"""Nodes, nodes of a leaf, and how many of chance die; 0 for one leaf."""
EPOCHS = 14


def named(cluster: Cluster, dead: Collection[int]) -> tuple[list[float], set[str]]:
    """Let nodes die; return the seconds until each was named, and whatever else was accused."""
    began, mark = cluster.epoch * cluster.conditions.period, len(cluster.log)
    cluster.fault = Fault(
        Part.NODE,
        float("inf"),
        min(dead),
        outcome=Outcome.UNREACHABLE,
        more=frozenset(dead),
    )
    for _ in range(EPOCHS):
        cluster.step()
    names = {cluster.names[node] for node in dead}
    alive = {leaf for name, leaf in cluster.leaves.items() if name not in names}
    seconds, others = dict.fromkeys(names, float("inf")), set()
    for at, on, suspect, node in cluster.log[mark:]:
        if not on or node in dead:
            continue
        meant = {
            name
            for name in names
            if suspect.reason != AMBIGUOUS
            and suspect.component in {name, cluster.leaves[name]} - alive
        }
        for name in meant:
            seconds[name] = min(seconds[name], at - began)
        if not meant:
            others.add(f"{suspect.part} {suspect.reason}")
    return sorted(seconds.values()), others


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="How soon several dead nodes are named.")
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    heading(
        "nodes", "leaf", "dead", "clusters", "first p50 s", "p95 s", "each p50 s", "p95 s",
        "all p50 s", "p95 s", "others accused",
    )  # fmt: skip
    for nodes, leaf, count in CASES:
        first, each, last, others = [], [], [], []
        for seed in range(seeds):
            cluster = Cluster(nodes, leaf, Conditions(), seed)
            for _ in range(6):
                cluster.step()
            dead = cluster.random.sample(range(nodes), count) if count else range(leaf)
            seconds, wrong = named(cluster, dead)
            first.append(seconds[0])
            each += seconds
            last.append(seconds[-1])
            others += sorted(wrong)
        times = " | ".join(
            f"{quantile(values, share):.0f}"
            for values in (first, each, last)
            for share in (0.5, 0.95)
        )
        print(
            f"| {nodes} | {leaf} | {count or 'a leaf'} | {seeds} | {times} | "
            f"{', '.join(others) or '-'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
