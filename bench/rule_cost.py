"""What the shipped rules cost over a large fleet, in CPU time: the same however busy the machine
is.

    python -m bench.rule_cost TEXT [--nodes 1000]

TEXT is what `/metrics?tier=verdict` of a node says. Every node of the fleet has it for a minute, in
leaves of 32 that have a job each, in blocks that promtool makes. A Prometheus without rules is
asked for each rule's expression at the minute's end; what rules record goes into a block of its
own, until nothing new is recorded. Prometheus evaluates a group on one CPU: its CPU time is how
long it takes on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil
import yaml

from bench.processes import table
from tests.grafana.server import Prometheus, prometheus, write_blocks
from tests.lab.servers import PROMETHEUS

LEAF = 32
RULES = ("thresholds.yml", "recording.yml", "alerts.yml")
SECONDS = {"s": 1, "m": 60}
AIM = 1 / 3
SCRAPES = (45, 30, 15, 0)
"""Seconds before the moment of the rules at which the nodes were scraped."""
DEAREST = 21
TURNS = 2
"""How often an expression is asked for: the least counts."""


def lines(text: str, node: int) -> Iterator[tuple[str, str, str]]:
    """Yield the series of a node: family, labels and value."""
    target = (
        f'instance="10.0.{node // 250}.{node % 250}:10061",node="node-{node}",'
        f'leaf="leaf-{node // LEAF}",job="dshealthd",exporter="dshealthd"'
    )
    yield "up", target, "1"
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        assert match is not None, "agents write no other lines"
        name, labels, value = match.groups()
        labels = re.sub(r'\b((?:training_job|run)="[^"]+)"', rf'\1-{node // LEAF}"', labels or "")
        labels = re.sub(
            r'\brank="(\d+)"', lambda rank: f'rank="{8 * (node % LEAF) + int(rank[1])}"', labels
        )
        if name == "dshealthd_job_lowest_rank":
            value = str(8 * (node % LEAF) + float(value))
        yield name, f"{labels}{',' if labels else ''}{target}", value


def block(series: Iterable[tuple[str, str, str]], when: float, directory: Path) -> None:
    """Make a block of series: family, labels and value."""
    families: dict[str, list[str]] = {}
    for name, labels, value in series:
        families.setdefault(name, []).extend(
            f"{name}{{{labels}}} {value} {when - age}" for age in SCRAPES
        )
    texts = (
        f"# TYPE {name} unknown\n" + "\n".join(families[name]) + "\n" for name in sorted(families)
    )
    write_blocks(texts, directory)


def recorded(
    rules: Mapping[str, list[str]], server: Prometheus, when: float
) -> list[tuple[str, str, str]]:
    """Return what the recording rules say: name, labels and value."""
    found = []
    for name, expressions in rules.items():
        for expression in expressions:
            answer = server.instant(expression, when)
            for labels, values in zip(answer.series, answer.values, strict=True):
                text = ",".join(
                    f"{key}={json.dumps(value)}"
                    for key, value in labels.items()
                    if key != "__name__"
                )
                found.append((name, text, str(values[-1])))
    return found


def main() -> None:
    """Print the groups, and the dearest rules."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rules", type=Path, default=PROMETHEUS, help="rule files (%(default)s)")
    options = parser.parse_args()
    when = time.time() - 60.0
    groups = [
        group
        for file in RULES
        for group in yaml.safe_load((options.rules / file).read_text(encoding="utf-8"))["groups"]
    ]
    recording: dict[str, list[str]] = {}
    for group in groups:
        for rule in group["rules"]:
            if "record" in rule:
                recording.setdefault(rule["record"], []).append(rule["expr"])
    rows: list[list[object]] = []
    single: list[tuple[float, str]] = []
    text = options.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        fleet = [one for node in range(options.nodes) for one in lines(text, node)]
        (directory / "prometheus.yml").write_text(json.dumps({}), encoding="utf-8")
        known, said = -1, list[tuple[str, str, str]]()
        while len(said) > known:
            known = len(said)
            # One block: Prometheus would spend time on merging several.
            shutil.rmtree(directory / "data", ignore_errors=True)
            block(itertools.chain(fleet, said), when, directory)
            with prometheus(directory, directory / "prometheus.yml") as server:
                said = recorded(recording, server, when)
        with prometheus(directory, directory / "prometheus.yml") as server:
            (process,) = (
                child for child in psutil.Process().children() if "prometheus" in child.name()
            )

            def cost(expression: str) -> float:
                least = math.inf
                for _ in range(TURNS):
                    before = sum(process.cpu_times()[:2])
                    server.instant(expression, when)
                    least = min(least, sum(process.cpu_times()[:2]) - before)
                return least

            series = server.instant('count({job="dshealthd", __name__!~".*:.*"})', when).values
            for group in groups:
                costs = [
                    (cost(rule["expr"]), rule.get("record") or rule["alert"])
                    for rule in group["rules"]
                ]
                single += costs
                seconds = sum(spent for spent, _ in costs)
                interval = float(group["interval"][:-1]) * SECONDS[group["interval"][-1]]
                rows.append(
                    [group["name"], group["interval"], len(costs), seconds, seconds / interval]
                )
            memory = process.memory_info().rss / 2**30
    print(f"{series[0][0]:,.0f} series, {memory:.2f} GiB with the blocks and queries\n")
    print(table(["group", "interval", "rules", "CPU s", "share of the interval"], rows))
    print(
        table(
            ["dearest rules", "CPU s"],
            [[name, spent] for spent, name in sorted(single)[:-DEAREST:-1]],
        )
    )
    worst = max(float(str(row[4])) for row in rows)
    print(f"The slowest group takes {worst:.2f} of its interval; the aim is {AIM:.2f}.")


if __name__ == "__main__":
    main()
