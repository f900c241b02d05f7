"""A whole fleet: two clusters with the same addresses, two partitions and two models in each."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.symptoms.fleet.nodes import Node, chance, export
from tests.symptoms.fleet.series import Series

MISSED = 0.001
"""Share of scrapes that fail in a healthy fleet."""


def nodes(count: int, minutes: int, seed: int) -> list[Node]:
    """Return nodes with what happens to each; the same for the same seed."""
    random = Random(seed)
    found = []
    for number in range(count):
        cluster, place = ("x", "y")[number % 2], number // 2
        partition = place % 2
        size = len([other for other in range(count) if other % 2 == number % 2])
        node = Node(
            cluster=cluster,
            name=f"n{place}",
            address=f"10.0.{place // 250}.{place % 250}:10061",
            model=("H100", "A100")[partition],
            partition=partition,
            members=len(range(partition, size, 2)),
        )
        found.append(node)
        node.misses = chance(random, minutes, MISSED)
        # Upgrades of the agent go round, one node after the other; an agent is away for one scrape.
        node.misses.append(minutes // 3 + place % 10)
        if random.random() < 0.15:
            node.reboots.append((random.randrange(minutes // 4, minutes // 2), 2))
        if random.random() < 0.1:
            node.flaps.append(random.randrange(30, minutes - 30))
        node.jobs = list(_jobs(node, minutes, random))
        for start, end, _ in node.jobs:
            if not place % 3 and end - start > 40:
                node.checkpoints.append(start + (end - start) // 2)
        if place == 1:
            node.joins = minutes // 5
    return found


def _jobs(node: Node, minutes: int, random: Random) -> Iterator[tuple[int, int, str]]:
    busy_until = 0
    for number in range(1 + minutes // 200):
        start = busy_until + random.randrange(10, 40)
        end = min(start + random.randrange(60, 240), minutes)
        if start < minutes and not any(at < end + 5 and at + 10 > start for at, _ in node.reboots):
            yield start, end, f"slurm-{node.name}-{number}"
        busy_until = end


def healthy(count: int, minutes: int, seed: int) -> tuple[Series, list[Node]]:
    """Return the series of a fleet in which nothing is broken, and its nodes."""
    series, found = Series(minutes), nodes(count, minutes, seed)
    for node in found:
        export(node, series)
    series.put(
        "prometheus_rule_group_last_duration_seconds",
        {"job": "prometheus", "instance": "p:9090", "rule_group": "/etc/alerts.yml;dshealthd-gpu"},
        1.0,
    )
    return series, found
