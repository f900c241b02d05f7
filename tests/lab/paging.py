"""A lab from whose faults pages come.

Nodes with simulated hardware, the real Prometheus and Alertmanager, and a receiver.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from dshealthd.cli.main import main as dshealthd
from dshealthd.config import registry
from dshealthd.core.options import encode
from tests.kernel_log import KernelLog
from tests.lab import probing
from tests.lab.hardware import CHECKPOINTS, DATA, equip, training
from tests.lab.lab import Lab
from tests.lab.node import Node, merged, toml
from tests.lab.receiver import Notification, Receiver
from tests.lab.servers import Server, alertmanager, prometheus, routes
from tests.waiting import until

NOT_THE_NODES_OWN = {"clock", "pressure", "software"}
"""Collectors of what all nodes share with the machine that the lab runs on.

Its clock, its load, its environments.
"""
COLLECTORS = tuple(name for name in registry.all_collectors() if name not in NOT_THE_NODES_OWN)
QUIET_COLLECTORS = tuple(name for name in COLLECTORS if name != "memory")
"""Without what tells of the memory of the machine that the lab runs on.

Where another test has the OOM killer end a process, every node would have a ticket for five
minutes.
"""
INTERVAL = "2s"
"""From one sample to the next: less than Prometheus takes from one scrape to the next, and half of
the CPU that samples of each second take.
"""
HANGS = "5s"
"""Deadline for what may hang.

Shorter than the shipped one of the devices, and long enough for a healthy one on two busy cores.
"""
READY_SECONDS = 180.0


def settings(node: Node, *, as_shipped: bool = False) -> dict[str, Any]:
    """Return what a node's configuration has beside the lab's own.

    `as_shipped`, all intervals and deadlines are the defaults.
    """
    places: dict[str, Any] = {
        "path": {"dev": str(node.directory / "dev")},
        "collectors": {
            "filesystem": {"paths": [DATA], "write_test": [CHECKPOINTS]},
        },
    }
    kinds = registry.all_collectors()
    if as_shipped:
        pace = {
            name: {"interval": encode(kinds[name].Options())["interval"]} for name in COLLECTORS
        }
    else:
        pace = {
            **{
                name: {"deadline": HANGS} for name, kind in kinds.items() if kind.worker == "device"
            },
            "filesystem": {"write_interval": "1s", "deadline": HANGS},
        }
    return merged({"collectors": pace}, places)


class Paging:
    """Starts everything as a context manager, and ends it."""

    lab: Lab
    receiver: Receiver
    prometheus: Server
    alertmanager: Server

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        *,
        gpus: int = 8,
        progress: Callable[[str], None] = lambda _: None,
        show: Callable[[Notification], None] = lambda _: None,
        adapt: Callable[[dict[str, Any]], object] = lambda _: None,
        as_shipped: bool = False,
        period: float | None = None,
        slow_ratio: float = 9.0,
        collectors: Sequence[str] = COLLECTORS,
        training: bool = False,
        itself: bool = False,
    ) -> None:
        """Prepare.

        With `training` each node has a job of its own, so that a fault of its hardware is a page;
        with `itself` Prometheus scrapes itself, too.

        Where `as_shipped`, the agents sample as seldom, and give up as late, as they do without a
        configuration; with a `period` in seconds they probe each other, by echoes, which are slow
        if they take `slow_ratio` times longer than usual. `show` is called with what the receiver
        gets; `adapt` may change more of Alertmanager's configuration than a lab does anyway.
        """
        self._as_shipped, self._period, self._slow_ratio = as_shipped, period, slow_ratio
        self._directory, self._nodes, self._gpus = directory, nodes, gpus
        self._collectors = collectors
        self._training, self._itself = training, itself
        self._progress, self._show, self._adapt = progress, show, adapt
        self.targets = directory / "targets.json"
        """What Prometheus scrapes, which it reads again as it changes."""
        self.kernel_logs: dict[str, KernelLog] = {}

    def _hurried(self, config: dict[str, Any]) -> None:
        """Have news of a group sent after seconds, for which the shipped routes wait minutes."""
        for route in routes(config):
            route["group_interval"] = "5s"
        self._adapt(config)

    def __enter__(self) -> Self:
        """Start the nodes and the servers; what has been started is ended when something fails."""
        with contextlib.ExitStack() as stack:
            lab = Lab(
                self._directory / "lab",
                self._nodes,
                gpus=self._gpus,
                config=lambda node: toml(self._settings(node)),
                collectors=self._collectors,
                interval=INTERVAL,
                start=False,
                progress=self._progress,
            )
            self.lab = stack.enter_context(lab)
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        lab = self.lab
        for node in lab.nodes:
            log = self.kernel_logs[node.name] = equip(node)
            stack.callback(log.close)
        for number, node in enumerate(lab.nodes):
            if self._training:
                stack.enter_context(training(node, number))
            node.begin(module="tests.lab.brief_agent")
        hostfile = str(lab.directory / "hostfile")
        assert dshealthd(["targets", "--hostfile", hostfile, "--output", str(self.targets)]) == 0
        self.receiver = stack.enter_context(Receiver(lab.services, self._show))
        self._progress(f"receiver of pages: {self.receiver.url}")
        self.alertmanager = stack.enter_context(
            alertmanager(lab.services, self._directory, self.receiver, self._hurried)
        )
        self._progress(f"Alertmanager: {self.alertmanager.url}")
        for number, node in enumerate(lab.nodes, start=1):
            node.finish()
            self._progress(f"agents: {number} of {len(lab.nodes)} serve")
        discovery = {"file_sd_configs": [{"files": [str(self.targets)]}]}
        where = f"{self.alertmanager.station.address}:{self.alertmanager.port}"
        self.prometheus = stack.enter_context(
            prometheus(lab.services, self._directory, discovery, [where], itself=self._itself)
        )
        self._progress(f"Prometheus: {self.prometheus.url}")

    def _settings(self, node: Node) -> dict[str, Any]:
        found = settings(node, as_shipped=self._as_shipped)
        if self._period is None:
            return found
        return merged(
            found,
            probing.settings(node, period=self._period, full=False, slow_ratio=self._slow_ratio),
        )

    def until_watched(self, seconds: float = READY_SECONDS) -> None:
        """Wait until every node is scraped, the thresholds are known, and the Watchdog has come
        through all of the chain.
        """
        end = time.monotonic() + seconds
        steps = {
            "nodes scraped": f'count(up{{exporter="dshealthd"}} == 1) == {len(self.lab.nodes)}',
            "thresholds known": 'count({__name__=~"dshealthd:threshold:.+"})',
        }
        for what, expression in steps.items():
            until(
                partial(self.prometheus.query, expression),
                self.prometheus.log.read_text,
                end - time.monotonic(),
            )
            self._progress(what)
        assert self.receiver.wait(
            lambda: self.receiver.firing("watchdog"), end - time.monotonic()
        ), "no Watchdog came"
        self._progress("the Watchdog came through")

    def pending(self) -> str:
        """Return the alerts that Prometheus has, for the error of a test."""
        return json.dumps(self.prometheus.ask("/api/v1/alerts")["data"]["alerts"], indent=1)
