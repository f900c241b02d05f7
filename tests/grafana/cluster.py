"""Two nodes with simulated GPUs and adapters that probe each other, and a Prometheus with the
shipped files that scrapes them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

from dshealthd.config import registry
from grafana import limits
from tests import yaml_files
from tests.grafana.server import prometheus
from tests.lab import Lab
from tests.lab.node import merged, toml
from tests.lab.probing import rounds, settings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tests.agents import Scrape
    from tests.grafana.server import Prometheus
    from tests.lab import Node

ADAPTERS = Path(__file__).parent.parent / "collectors" / "fixtures" / "infiniband" / "sys"
PERIOD = 2.0
ROUNDS = 2
SCRAPES = 6
DEPLOY = limits.FILE.parent
OF_THIS_MACHINE = {"DshealthdHostMemoryPressure"}
"""Alerts that other tests cause on all nodes, by a process that the OOM killer ends."""


class Cluster(NamedTuple):
    """What the tests ask."""

    prometheus: Prometheus
    lab: Lab


@contextlib.contextmanager
def cluster(directory: Path, *, nodes: int = 2, gpus: int = 8) -> Iterator[Cluster]:
    """Start nodes and Prometheus, and wait until every agent has probed and was scraped since."""

    def config(node: Node) -> str:
        tested = {"paths": [str(node.directory), "/dev/shm"], "write_test": [str(node.directory)]}
        own = {
            "probe": {"members": {"name": node.member}},
            "collectors": {"network": {"include": ["lo"]}, "filesystem": tested},
        }
        return toml(merged(settings(node, period=PERIOD, full=True), own))

    made = Lab(
        directory,
        nodes,
        gpus=gpus,
        config=config,
        # Both agents see all processes of this machine: jobs that other tests run would have every
        # rank twice.
        collectors=tuple(name for name in registry.all_collectors() if name != "job_environment"),
        interval="1s",
        namespaces=False,
        start=False,
    )
    with made as lab:
        hostfile = "".join(f"{node.member} slots=1\n" for node in lab.nodes)
        for node in lab.nodes:
            shutil.copytree(ADAPTERS, node.sysfs, symlinks=True, dirs_exist_ok=True)
            node.hostfile.write_text(hostfile, encoding="ascii")
            node.begin()
        for node in lab.nodes:
            node.finish()
        targets = [
            {"targets": [f"{node.address}:{node.agent.port}"], "labels": {"node": node.name}}
            for node in lab.nodes
        ]
        config_file = shipped(directory, json.dumps(targets), without=OF_THIS_MACHINE)
        with prometheus(directory, config_file) as server:
            lab.wait(lambda scrapes: all(map(_probed, scrapes.values())), 200)
            settled = (
                f"min(count_over_time(up[1h])) >= {SCRAPES} and min(timestamp(up)) > {time.time()}"
                ' and min(up{exporter="dshealthd"}) == 1'
            )
            end = time.monotonic() + 200
            while not server.instant(settled, time.time()).series:
                assert time.monotonic() < end
                time.sleep(0.5)
            yield Cluster(server, lab)


def _probed(scrape: Scrape) -> bool:
    """Tell whether an agent has had rounds, and has led a light one that measured the round trip
    and the bandwidth: neither is known where an agent waited for a CPU.
    """
    return (
        rounds(scrape, outcome="ok") >= ROUNDS
        and bool(scrape.all("dshealthd_probe_round_trip_seconds"))
        and bool(scrape.all("dshealthd_probe_bus_bandwidth_bytes_per_second", kind="light"))
    )


def shipped(
    directory: Path, targets: str, *, interval: str = "1s", without: Collection[str] = ()
) -> Path:
    """Lay out the shipped configuration and rules with these targets, all of it at a quicker pace
    and `without` some alerts, and return the configuration's path.
    """
    for file in ("thresholds.yml", "recording.yml", "alerts.yml"):
        rules = yaml_files.load(DEPLOY / file)
        for group in rules["groups"]:
            group.pop("interval", None)
            group["rules"] = [rule for rule in group["rules"] if rule.get("alert") not in without]
        (directory / file).write_text(yaml.safe_dump(rules, sort_keys=False), encoding="utf-8")
    config = yaml_files.load(DEPLOY / "dshealthd.yml")
    config["global"] = {"evaluation_interval": interval}
    for job in config["scrape_configs"]:
        job |= {"scrape_interval": interval, "scrape_timeout": interval}
    del config["alerting"]
    (directory / "targets").mkdir()
    (directory / "targets" / "nodes.json").write_text(targets, encoding="utf-8")
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return directory / "prometheus.yml"
