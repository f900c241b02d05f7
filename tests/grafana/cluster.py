"""What two nodes with simulated GPUs and adapters export that probe each other, and the shipped
files for a Prometheus.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from deploy.kubernetes import rules
from dshealthd.config import registry
from grafana import limits
from tests import yaml_files
from tests.agents import Scrape
from tests.lab import Lab, Node
from tests.lab.node import merged, toml
from tests.lab.probing import rounds, settings

ADAPTERS = Path(__file__).parent.parent / "collectors" / "fixtures" / "infiniband" / "sys"
PERIOD = 4.0
PROBED_SECONDS = 400.0
"""For a round in which neither agent waits for a CPU."""
DEPLOY = limits.FILE.parent
PACE = "3s"
"""How often all rules are evaluated."""


def scraped(directory: Path) -> Scrape:
    """Start two nodes with eight GPUs each, and return what one exports once both have probed."""

    def config(node: Node) -> str:
        tested = {"paths": [str(node.directory), "/dev/shm"], "write_test": [str(node.directory)]}
        own = {
            "probe": {"members": {"name": node.member}},
            "collectors": {"network": {"include": ["lo"]}, "filesystem": tested},
        }
        return toml(merged(settings(node, period=PERIOD, full=True), own))

    made = Lab(
        directory,
        2,
        config=config,
        # Both agents see all processes of this machine: jobs that other tests run would have every
        # rank twice.
        collectors=tuple(name for name in registry.all_collectors() if name != "job_environment"),
        interval="2s",
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
        scrapes = lab.wait(
            lambda found: len(found) == len(lab.nodes) and all(map(_probed, found.values())),
            PROBED_SECONDS,
        )
        return scrapes[lab.nodes[0].name]


def _probed(scrape: Scrape) -> bool:
    """Tell whether an agent has had a round, and has looked twice where it compares two looks. What
    a round measures `fleet` adds: it is not known where an agent waited for a CPU.
    """
    return rounds(scrape, outcome="ok") > 0 and "dshealthd_processes_stuck" in scrape.series


def shipped(directory: Path) -> Path:
    """Lay out the shipped configuration and rules without targets, at one pace, and return the
    configuration's path.
    """
    for file in rules.FILES:
        document = yaml_files.load(DEPLOY / file)
        for group in document["groups"]:
            group.pop("interval", None)
        (directory / file).write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    config = yaml_files.load(DEPLOY / "dshealthd.yml")
    config["global"] = {"evaluation_interval": PACE}
    del config["alerting"]
    (directory / "targets").mkdir()
    (directory / "targets" / "nodes.json").write_text("[]", encoding="utf-8")
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return directory / "prometheus.yml"
