"""A real Prometheus scrapes exactly the nodes that are probed, as one of their agents tells it."""

from __future__ import annotations

import contextlib
import time
import urllib.error
from http import HTTPStatus
from pathlib import Path

from tests.lab.node import Node, toml
from tests.lab.probing import Probing, settings
from tests.lab.servers import Server, prometheus
from tests.lab.station import Loopback, listen
from tests.symptoms.chain import played
from tests.waiting import until

TOPOLOGY = "SwitchName=leaf-a Nodes=node-1\nSwitchName=leaf-b Nodes=node-2\n"


SILENT = 8
"""Targets that never answer: each is scraped at a moment of its own within the interval."""


def scraped(server: Server) -> dict[str, dict[str, str]]:
    """Return the labels of the targets that are up, by instance."""
    return {
        series["metric"]["instance"]: series["metric"]
        for series in server.query('up{exporter="dshealthd"} == 1')
    }


def known(server: Server) -> dict[str, str]:
    """Return what became of the last scrape of each target, by the target's node."""
    active = server.ask("/api/v1/targets?state=active")["data"]["activeTargets"]
    return {
        target["labels"]["node"]: target["health"]
        for target in active
        if target["labels"]["job"] == "dshealthd"
    }


def told(node: Node) -> list[str]:
    """Return the lines of the targets that an agent lists: none until it knows its members."""
    try:
        answer = node.get("/api/v1/targets")
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return []
    return [line for line in answer.splitlines() if "node-" in line]


def test_prometheus_follows_the_members(tmp_path: Path) -> None:
    """Every member is scraped with name and leaf until it leaves; a broken list, which is a ticket,
    or a dead agent changes nothing.
    """
    with Probing(tmp_path / "lab", 2, full=False) as lab:
        one, two = lab.nodes
        for node in (one, two):
            (node.directory / "topology.conf").write_text(TOPOLOGY, encoding="ascii")
            node.config(toml(settings(node, period=lab.period, full=False, leaves=True)))

        lab.wait(lambda _: len(lines := told(one)) == 2 and "leaf-a" in lines[0])
        url = f"http://{one.name}:{one.agent.port}/api/v1/targets"
        with prometheus(
            lab.services,
            tmp_path,
            {"http_sd_configs": [{"url": url, "refresh_interval": "1s"}]},
            pace="1s",
        ) as server:
            until(lambda: len(scraped(server)) == 2, server.log.read_text)
            found = scraped(server)
            assert set(found) == {"node-1:10061", "node-2:10061"}
            assert [(labels["node"], labels["leaf"]) for _, labels in sorted(found.items())] == [
                ("node-1", "leaf-a"),
                ("node-2", "leaf-b"),
            ]

            one.hostfile.write_text("node-1 slots=1\n", encoding="ascii")
            until(lambda: set(scraped(server)) == {"node-1:10061"}, server.log.read_text)
            well = lab.wait(lambda scrapes: "node-1" in scrapes)
            one.hostfile.write_text("nonsense\n", encoding="ascii")
            ill = lab.wait(
                lambda scrapes: (
                    "node-1" in scrapes
                    and scrapes["node-1"].value("dshealthd_members_last_reload_successful") == 0
                )
            )
            time.sleep(2.5)
            assert known(server).keys() == {"node-1"}
            assert played("DshealthdAgentTrouble", (well, ill), tmp_path) == (False, True)
            one.kill()
            time.sleep(2.5)
            until(lambda: known(server) == {"node-1": "down"}, server.log.read_text)


def test_nodes_that_only_time_out_are_absent(tmp_path: Path) -> None:
    """A node that is gone answers nothing, not even that nobody listens.

    Its failed scrapes are recorded when they time out, with the time at which they began. Whichever
    moments of the interval are those of the scrapes and of the rules, each is counted.
    """
    with contextlib.ExitStack() as stack:
        station = Loopback("services", "127.0.0.1", tmp_path)
        stack.callback(station.close)
        sockets = [stack.enter_context(listen(station)) for _ in range(SILENT)]
        targets = [
            {
                "targets": [f"127.0.0.1:{listener.getsockname()[1]}"],
                "labels": {"node": f"node-{number}"},
            }
            for number, listener in enumerate(sockets)
        ]
        server = stack.enter_context(prometheus(station, tmp_path, {"static_configs": targets}))
        absent = 'count(dshealthd:node:absent{exporter="dshealthd"})'
        until(
            lambda: any(series["value"][1] == str(SILENT) for series in server.query(absent)),
            server.log.read_text,
        )
