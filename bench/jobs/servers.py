"""What watches the trainings: two nodes, each with an agent, and a Prometheus with the shipped
rules.

A node is a pid namespace of its own, so that each agent sees the processes of its ranks alone.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.processes import free_port, serving
from tests.lab.servers import Server, running_server
from tests.lab.station import Loopback
from tests.processes import children
from tests.symptoms.promtool import RULES
from tests.waiting import until

WATCHED = (
    "dshealthd_job_step_work_seconds",
    "dshealthd_job_step_wait_seconds",
    "dshealthd:job:work_ratio",
    "dshealthd_job_overdue_seconds",
    "dshealthd_job_stage",
    "dshealthd_job_hang",
    "dshealthd:job:hang_evidence",
    "ALERTS",
)
"""Series of a job that are kept with the result of each fault."""
PLACE = ("alertname", "alertstate", "rank", "node", "class", "reason", "role", "stage")
"""The labels of them that are kept."""


class Node:
    """A pid namespace with an agent."""

    def __init__(self, name: str, holder: int) -> None:
        self.name = name
        self.inside = ("nsenter", "-t", str(holder), "-p", "-m", "--")
        """What a command on the node begins with."""


@contextlib.contextmanager
def node(name: str, directory: Path) -> Iterator[tuple[Node, int]]:
    """Run a node, and return it with the port of its agent."""
    # A shell reaps what is left to it.
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
    command += ["while :; do sleep 1; done"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as holder:
        try:
            (inside,) = until(lambda: children(holder.pid))
            made = Node(name, inside)
            state, port = directory / name, free_port()
            state.mkdir()
            flags = ["--web.listen-address", f"127.0.0.1:{port}", "--path.state", state]
            command = [*made.inside, sys.executable, "-P", "-m", "dshealthd", "run"]
            with serving(name, [*command, *map(str, flags)], port):
                yield made, port
        finally:
            holder.kill()


class Prometheus:
    """A Prometheus with the shipped rules."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def firing(self, job: str) -> list[dict[str, str]]:
        """Return the labels of the firing alerts about a job, with the rank that a page about a
        slow one names.
        """
        text = f'ALERTS{{alertstate="firing", training_job="{job}"}}'
        alerts: list[dict[str, str]] = [sample["metric"] for sample in self._server.query(text)]
        slowest = {
            (sample["metric"]["node"], sample["metric"].get("role", "")): sample["value"][1]
            for sample in self._server.query(f'dshealthd:job:slowest_rank{{training_job="{job}"}}')
        }
        for labels in alerts:
            place = labels.get("node", ""), labels.get("role", "")
            if labels["alertname"] == "DshealthdRankSlow" and place in slowest:
                labels["rank"] = slowest[place]
        return alerts

    def ratio(self, job: str, node: str) -> float | None:
        """Return the ratio of the own work of a node's slowest rank to that of its peers."""
        text = f'max(dshealthd:job:work_ratio{{training_job="{job}", node="{node}"}})'
        samples = self._server.query(text)
        return float(samples[0]["value"][1]) if samples else None

    def steps(self, job: str) -> dict[int, int]:
        """Return the step of each rank of a job."""
        samples = self._server.query(f'dshealthd_job_step{{training_job="{job}"}}')
        return {int(sample["metric"]["rank"]): int(sample["value"][1]) for sample in samples}

    def telling(self, job: str) -> set[int]:
        """Return the ranks of a job that tell of their own work."""
        text = f'dshealthd_job_step_work_seconds{{training_job="{job}"}}'
        return {int(sample["metric"]["rank"]) for sample in self._server.query(text)}

    def past(self, job: str, began: float, ended: float) -> dict[str, dict[str, Any]]:
        """Return the series of a job between two Unix times, at every fifth second."""
        found: dict[str, dict[str, Any]] = {}
        for name in WATCHED:
            query = f'{name}{{training_job="{job}"}}'
            asked = {"query": query, "start": began, "end": ended, "step": "5"}
            answer = self._server.ask(f"/api/v1/query_range?{urllib.parse.urlencode(asked)}")
            for sample in answer["data"]["result"]:
                labels = sample["metric"]
                key = " ".join(f"{label}={labels[label]}" for label in PLACE if labels.get(label))
                values = {round(at - began): float(value) for at, value in sample["values"]}
                found.setdefault(name, {}).setdefault(key, {}).update(values)
        return found


@contextlib.contextmanager
def prometheus(directory: Path, targets: dict[str, int]) -> Iterator[Prometheus]:
    """Run Prometheus on the shipped rules; `targets` are the nodes' names and their agents'
    ports.
    """
    config = {
        "rule_files": list(map(str, RULES)),
        "scrape_configs": [
            {
                "job_name": "dshealthd",
                "scrape_interval": "5s",
                "static_configs": [
                    {
                        "targets": [f"127.0.0.1:{port}"],
                        "labels": {"node": name, "exporter": "dshealthd"},
                    }
                    for name, port in targets.items()
                ],
            }
        ],
    }
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    flags = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    station = Loopback("prometheus", "127.0.0.1", directory)
    with running_server("prometheus", flags, station, directory, free_port()) as server:
        yield Prometheus(server)


@contextlib.contextmanager
def watch(directory: Path) -> Iterator[tuple[Sequence[Node], Prometheus]]:
    """Run two nodes, and a Prometheus that scrapes both agents."""
    with contextlib.ExitStack() as stack:
        entered = [stack.enter_context(node(name, directory)) for name in ("node-1", "node-2")]
        targets = {made.name: port for made, port in entered}
        server = stack.enter_context(prometheus(directory, targets))
        yield [made for made, _ in entered], server
