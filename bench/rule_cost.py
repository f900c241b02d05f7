"""What the shipped rules cost over a large fleet, in CPU time: the same however busy the machine is.

    python -m bench.rule_cost TEXT [--nodes 1000]

TEXT is what `/metrics?tier=verdict` of a node says. Every node of the fleet has it, in leaves of 32
that have a job each, in blocks that promtool makes; a Prometheus without rules is asked for each
rule's expression at that moment. What rules record is missing, so that those that read it have less
to do. Prometheus evaluates a group on one CPU: its CPU time is how long it takes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml

from bench.processes import table
from tests.grafana.server import prometheus
from tests.lab.servers import PROMETHEUS

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAF = 32
RULES = ("thresholds.yml", "recording.yml", "alerts.yml")
SECONDS = {"s": 1, "m": 60}
AIM = 1 / 3


def lines(text: str, node: int, when: float) -> Iterator[tuple[str, str]]:
    """Yield the series of a node by family, each with one sample."""
    target = (
        f'instance="10.0.{node // 250}.{node % 250}:10061",node="node-{node}",'
        f'leaf="leaf-{node // LEAF}",job="dshealthd",exporter="dshealthd"'
    )
    yield "up", f"up{{{target}}} 1 {when}"
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr] # agents write no other lines
        labels = re.sub(r'training_job="[^"]+"', f'training_job="run-{node // LEAF}"', labels or "")
        labels = re.sub(
            r'\brank="(\d+)"', lambda rank: f'rank="{8 * (node % LEAF) + int(rank[1])}"', labels
        )
        yield name, f"{name}{{{labels}{',' if labels else ''}{target}}} {value} {when}"


def blocks(text: str, nodes: int, when: float, directory: Path) -> None:
    """Make the fleet's blocks."""
    families: dict[str, list[str]] = {}
    for node in range(nodes):
        for name, line in lines(text, node, when):
            families.setdefault(name, []).append(line)
    file = directory / "fleet.txt"
    with file.open("w", encoding="utf-8") as out:
        for name in sorted(families):
            out.write(f"# TYPE {name} unknown\n" + "\n".join(families[name]) + "\n")
        out.write("# EOF\n")
    command: list[str | Path] = [
        "promtool",
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        file,
        directory / "data",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    file.unlink()


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
    rows: list[list[object]] = []
    single: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        blocks(options.text.read_text(encoding="utf-8"), options.nodes, when, directory)
        (directory / "prometheus.yml").write_text(json.dumps({}), encoding="utf-8")
        with prometheus(directory, directory / "prometheus.yml") as server:
            (process,) = (
                child for child in psutil.Process().children() if "prometheus" in child.name()
            )

            def cost(expression: str) -> float:
                before = sum(process.cpu_times()[:2])
                server.instant(expression, when + 1)
                return sum(process.cpu_times()[:2]) - before

            series = server.instant('count({job="dshealthd"})', when + 1).values
            for file in RULES:
                document = yaml.safe_load((options.rules / file).read_text(encoding="utf-8"))
                for group in document["groups"]:
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
        table(["dearest rules", "CPU s"], [[name, spent] for spent, name in sorted(single)[:-9:-1]])
    )
    worst = max(float(str(row[4])) for row in rows)
    print(f"The slowest group takes {worst:.2f} of its interval; the aim is {AIM:.2f}.")


if __name__ == "__main__":
    main()
