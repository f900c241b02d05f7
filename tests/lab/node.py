"""One node of the lab: a machine with simulated GPUs and an agent."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from glob import glob
from typing import TYPE_CHECKING, Any

from dshealthd.config import registry
from tests.agents import RunningAgent, announced_port, end, launch
from tests.lab.station import Namespaces, Station, connect
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tests.agents import Scrape
    from tests.lab.lab import Lab

PORT = 10061
INTERFACE = "eth0"
"""A node's only one; without hardware, so that it has to be named for the collector."""
START_SECONDS = 120.0
"""For an agent of many that start at once on few cores."""


def profile(collectors: Iterable[str], interval: str) -> dict[str, Any]:
    """Return a configuration that samples only with these collectors, at this interval."""
    sections: dict[str, dict[str, Any]] = {
        name: {"enabled": False} for name in registry.all_collectors()
    }
    for name in collectors:
        sections[name] |= {"enabled": True, "interval": interval}
    sections["network"]["include"] = [INTERFACE]
    return {"collectors": sections}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return one configuration laid over another, table by table."""
    both = {
        key: merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **both}


def toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Write a configuration."""
    lines = [
        f"{json.dumps(key)} = {json.dumps(value)}"
        for key, value in table.items()
        if not isinstance(value, dict)
    ]
    if lines and path:
        lines.insert(0, f"\n[{'.'.join(map(json.dumps, path))}]")
    lines += [toml(value, (*path, key)) for key, value in table.items() if isinstance(value, dict)]
    return "\n".join(lines)


class Node:
    """A machine of the lab, its GPUs (`gpus`, steered as `tests.nvml.simulator` says) and its
    agent.

    `member` is its name in the hostfile: `name`, or the address where names cannot be given.
    `hostfile` is its own copy of the list of members, `hosts` what it sees as /etc/hosts, `sysfs`
    what its agent takes for /sys.
    """

    def __init__(
        self, number: int, station: Station, lab: Lab, *, gpus: int, profile: Mapping[str, Any]
    ) -> None:
        """Lay out the node's files; nothing runs yet. `number` counts from 1."""
        self.number, self.station, self.lab, self._profile = number, station, lab, profile
        self.name, self.address, self.directory = station.name, station.address, station.directory
        has_network = isinstance(station, Namespaces)
        self.member = self.name if has_network else self.address
        self.hostfile = self.directory / "hostfile"
        self.hosts = self.directory / "hosts"
        self.log = self.directory / "agent.log"
        self.config_file = self.directory / "dshealthd.toml"
        self.sysfs = self.directory / "sys"
        self.gpus = Simulator(self.directory / "nvml", gpus)
        self.gpus.set(None, "node", number)
        self.gpus.set(None, "temperature", f"{30 + number}+1")
        _lay_over_sysfs(self.sysfs)
        self.gpus.pci_sysfs(self.sysfs)
        self._text = ""
        self._port = PORT if has_network else 0
        self._agent: RunningAgent | None = None
        self._starting: subprocess.Popen[str] | None = None

    @property
    def agent(self) -> RunningAgent:
        """Return the running agent."""
        assert self._agent is not None, f"the agent of {self.name} does not run"
        return self._agent

    @property
    def runs(self) -> bool:
        """Tell whether the agent has been started and has not ended, by itself or otherwise."""
        return self._agent is not None and self._agent.process.poll() is None

    def begin(
        self, environment: Mapping[str, str] | None = None, module: str = "dshealthd"
    ) -> None:
        """Start the agent, which `module` is, without waiting for it."""
        assert not self.runs, f"the agent of {self.name} runs"
        self._starting = launch(
            self.directory,
            self._configuration(),
            environment={**self.gpus.environment(), **(environment or {})},
            address=self.address,
            port=self._port,
            flags=("--path.sysfs", str(self.sysfs)),
            popen=self.station.popen,
            module=module,
        )

    def finish(self, seconds: float = START_SECONDS) -> None:
        """Wait until the agent that `begin` started serves."""
        assert self._starting is not None
        self._port = announced_port(self._starting, self.log, seconds)
        self._agent = RunningAgent(self._starting, self._port, self.log, self.address, self.connect)
        self._starting = None

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the agent and wait until it serves.

        `environment` is what it is given beside that of the lab.
        """
        self.begin(environment)
        self.finish()

    def stop(self) -> None:
        """Have the agent stop, as systemd would; no error when it has."""
        process = self._agent.process if self._agent is not None else self._starting
        self._agent = self._starting = None
        if process is not None:
            end(process)

    def kill(self) -> None:
        """Kill the agent with SIGKILL."""
        self.agent.process.kill()
        self.stop()

    def config(self, text: str) -> None:
        """Lay a configuration over the lab's, table by table; a running agent reloads."""
        self._text = text
        new = self.config_file.with_suffix(".new")
        new.write_text(self._configuration(), encoding="utf-8")
        new.replace(self.config_file)
        if self.runs:
            self.agent.process.send_signal(signal.SIGHUP)

    def get(self, path: str, timeout: float = 60.0) -> str:
        """Return an answer of the agent, asked from the node itself, so that no fault of the
        network is in the way.
        """
        return self.agent.get(path, timeout)

    def scrape(self, timeout: float = 60.0) -> Scrape:
        """Ask the agent for /metrics."""
        return self.agent.scrape(timeout)

    def status(self) -> Any:
        """Ask the agent for /api/v1/status."""
        return self.agent.status()

    def log_tail(self) -> list[str]:
        """Return the last lines of the agent's log."""
        return self.log.read_text(encoding="utf-8").splitlines()[-15:] if self.log.exists() else []

    def connect(self, address: tuple[str, int], timeout: float = 60.0) -> socket.socket:
        """Return a TCP connection from this node."""
        return connect(self.station, address, timeout)

    def _configuration(self) -> str:
        return toml(merged(self._profile, tomllib.loads(self._text))) + "\n"


def _lay_over_sysfs(root: Path) -> None:
    """Make a /sys that shows the real one but for PCI devices, and to which a test can add classes
    such as `infiniband`.
    """
    for real, mine, left_out in (
        ("/sys", root, {"bus", "class", "devices"}),
        ("/sys/bus", root / "bus", {"pci"}),
        ("/sys/class", root / "class", {"infiniband"}),
        ("/sys/devices", root / "devices", set(map(os.path.basename, glob("/sys/devices/pci*")))),
    ):
        mine.mkdir(parents=True, exist_ok=True)
        for name in os.listdir(real):
            if name not in left_out and not (mine / name).is_symlink():
                (mine / name).symlink_to(f"{real}/{name}")
