"""The shipped rules on VictoriaMetrics: scraped by vmagent, evaluated by vmalert, by the settings
of docs/other-scrapers.md.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bench.processes import free_port
from tests import yaml_files
from tests.http.impostors import serving
from tests.lab.receiver import Receiver
from tests.lab.servers import (
    PROMETHEUS,
    RULES,
    Server,
    alertmanager,
    routes,
    running_server,
)
from tests.lab.station import Loopback
from tests.waiting import until

pytestmark = pytest.mark.neighbors
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/other-scrapers.md"
NODES = ("node-1", "node-2", "node-3", "node-4")
METRICS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n\r\n"
    b'dshealthd_build_info{version="1"} 1\n'
    b"dshealthd_members 4\n"
    b'dshealthd_probe_checksum{gpu="0",library="cublas"} 7\n'
)
"""What stands for an agent; a checksum, as each first one once was a change."""
LIMIT = 240.0
"""Seconds that a page may take here: far more than the 45 to 60 that it takes."""


class Agent(NamedTuple):
    """Answers scrapes, until it is to refuse connections."""

    target: str
    stop: Callable[[], None]


def answering(address: str) -> Agent:
    """Begin to answer."""
    stack = contextlib.ExitStack()
    port = stack.enter_context(serving(lambda client, _: client.sendall(METRICS), address))
    return Agent(f"{address}:{port}", stack.close)


class Fleet(NamedTuple):
    """Agents, and what scrapes and judges them."""

    agents: dict[str, Agent]
    storage: Server
    rules: Server
    receiver: Receiver


def settings(program: str) -> list[str]:
    """Return the flags that the docs give to a program and that name no file or address."""
    text = PAGE.read_text(encoding="utf-8")
    (command,) = re.findall(rf"^{program} ((?:[^\\\n]|\\\n)*)", text, re.MULTILINE)
    places = ("-rule=", "-promscrape.config=", "-storageDataPath=")
    return [
        flag
        for flag in shlex.split(command.replace("\\\n", " "))
        if not flag.startswith(places) and "://" not in flag
    ]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Four agents that are scraped, and whose alerts arrive."""
    station = Loopback("victoria", "127.0.0.171", tmp_path_factory.mktemp("station"))
    folder = tmp_path_factory.mktemp("victoria")
    agents = {name: answering(station.address) for name in NODES}
    config: dict[str, Any] = yaml_files.load(PROMETHEUS / "dshealthd.yml")
    ports = {name: free_port() for name in ("victoria-metrics", "vmalert", "vmagent")}
    for job in config["scrape_configs"]:
        if job["job_name"] == "prometheus":
            job["static_configs"] = [{"targets": [f"{station.address}:{ports['vmalert']}"]}]
            continue
        del job["file_sd_configs"]
        job["static_configs"] = [
            {"targets": [agent.target], "labels": {"node": name}} for name, agent in agents.items()
        ]
    (folder / "scrape.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def quick(config: dict[str, Any]) -> None:
        for route in routes(config):
            route |= {"group_wait": "1s", "group_interval": "1s"}

    with contextlib.ExitStack() as stack:
        for agent in agents.values():
            stack.callback(agent.stop)
        receiver = stack.enter_context(Receiver(station))
        warned = stack.enter_context(alertmanager(station, folder, receiver, quick))

        def start(name: str, *flags: str) -> Server:
            (folder / name).mkdir()
            return stack.enter_context(
                running_server(
                    name,
                    [*settings(name), *flags],
                    station,
                    folder / name,
                    ports[name],
                    "-httpListenAddr",
                )
            )

        storage = start("victoria-metrics", f"-storageDataPath={folder / 'data'}")
        rules = start(
            "vmalert",
            # As shipped, groups of five minutes are first evaluated at a random moment of these.
            "-group.maxStartDelay=10s",
            *(f"-rule={PROMETHEUS / name}" for name in RULES),
            f"-datasource.url={storage.url}",
            f"-remoteWrite.url={storage.url}",
            f"-remoteRead.url={storage.url}",
            f"-notifier.url={warned.url}",
        )
        start(
            "vmagent",
            f"-promscrape.config={folder / 'scrape.yml'}",
            f"-remoteWrite.url={storage.url}/api/v1/write",
            f"-remoteWrite.tmpDataPath={folder / 'queue'}",
        )
        yield Fleet(agents, storage, rules, receiver)


def groups(fleet: Fleet) -> list[dict[str, Any]]:
    """Return what vmalert tells of its groups."""
    found: list[dict[str, Any]] = fleet.rules.ask("/api/v1/rules")["data"]["groups"]
    return found


def waiting(fleet: Fleet) -> list[str]:
    """Return the groups that vmalert has not evaluated yet."""
    return [group["name"] for group in groups(fleet) if group["lastEvaluation"] < "2"]


def wait_for(said: str, condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    until(condition, lambda: said, LIMIT)


def firing(fleet: Fleet) -> Counter[str]:
    """Return how many alerts of each name fire, as vmalert has it."""
    alerts = fleet.rules.ask("/api/v1/alerts")["data"]["alerts"]
    return Counter(alert["name"] for alert in alerts if alert["state"] == "firing")


@pytest.mark.timeout(900)
def test_killed_node_is_a_page_and_nothing_else_is(fleet: Fleet) -> None:
    """All rules are evaluated without an error. A fleet that is well is silent; a node that is
    killed is one page, which names it.
    """
    wait_for("groups", lambda: not waiting(fleet))
    wait_for(
        "severities of all nodes",
        lambda: len(fleet.storage.query("dshealthd:node:severity")) == len(NODES),
    )
    assert firing(fleet) == {"DshealthdWatchdog": 1}
    fleet.agents["node-3"].stop()
    wait_for("a page", lambda: fleet.receiver.told("page"))
    (page,) = {
        (alert.labels["alertname"], alert.labels["node"]) for alert in fleet.receiver.told("page")
    }
    assert page == ("DshealthdAgentGone", "node-3")
    assert firing(fleet) == {"DshealthdWatchdog": 1, "DshealthdAgentGone": 1}
    errors = {
        rule["name"]: rule["lastError"]
        for group in groups(fleet)
        for rule in group["rules"]
        if rule.get("lastError")
    }
    assert errors == {}
    assert fleet.storage.query("dshealthd:gpu:computes_wrong") == []
