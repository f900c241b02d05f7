"""A machine of simulated hardware, and what the doctor says of it.

The command runs here, its collectors in worker processes of their own, as at a user's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dshealthd.cli import main as cli
from dshealthd.collection.supervisor import Supervisor
from dshealthd.config.config import Config
from dshealthd.core.options import Duration
from dshealthd.doctor import examination, status_document
from dshealthd.doctor.node import limits
from dshealthd.linux.forked import Function, Pool
from tests.nvml.simulator import Simulator

FIXTURES = Path(__file__).parents[1] / "collectors" / "fixtures"
OF_THIS_MACHINE = (
    "clock,host-errors,host-memory,disk-space,loopback,listeners,open-files,"
    "job-devices,job-ends,job-hangs,job-heartbeats,job-losses,job-nccl-settings,job-rendezvous,"
    "nccl-releases"
)
"""Checks that look at the machine that the tests run on, which may be ill."""
PATIENT = 120.0
"""Seconds within which a source answers, and a check ends, however busy the machine is."""

AS_SHIPPED = (status_document._hurried, Supervisor.__init__)


class PatientPool(Pool):
    """Processes that have longer than they would have beside nothing else."""

    def start(self, name: str, function: Function, deadline: float, *more: Any) -> None:
        """Start one."""
        super().start(name, function, max(deadline, PATIENT), *more)


def _unhurried(config: Config) -> Config:
    own = {
        name: dataclasses.replace(options, deadline=Duration(PATIENT))
        for name, options in config.collectors.items()
    }
    return dataclasses.replace(config, collectors=own)


def patient(patch: pytest.MonkeyPatch) -> None:
    """Give all that the doctor waits for so much time that only a fault takes it."""
    begin = functools.partialmethod(AS_SHIPPED[1], patience=PATIENT)
    patch.setattr(Supervisor, "__init__", begin)
    patch.setattr(status_document, "_hurried", _unhurried)
    for name in ("ASK_DEADLINE", "COLLECT_DEADLINE"):
        patch.setattr(status_document, name, PATIENT)
    patch.setattr(examination, "DEADLINE", 3 * PATIENT)
    patch.setattr(examination, "Pool", PatientPool)


def hurried(patch: pytest.MonkeyPatch) -> None:
    """Have what hangs found as soon as on a user's machine."""
    patch.setattr(status_document, "_hurried", AS_SHIPPED[0])
    patch.setattr(Supervisor, "__init__", AS_SHIPPED[1])


@dataclass(frozen=True)
class Answer:
    """What the command said."""

    status: int
    document: dict[str, Any]

    @property
    def node(self) -> dict[str, Any]:
        """The only node."""
        (node,) = self.document["nodes"]
        return dict(node)

    @property
    def found(self) -> dict[tuple[str, str], tuple[str, str]]:
        """What is not ok: slug and worst outcome by check and component."""
        found: dict[tuple[str, str], tuple[str, str]] = {}
        for check in self.node["checks"]:
            for result in check["results"]:  # the worst first
                if result["outcome"] != "ok":
                    key = check["check"], result["component"]
                    found.setdefault(key, (check["slug"], result["outcome"]))
        return found

    def results(self, name: str) -> list[dict[str, Any]]:
        """Return the results of one check."""
        (check,) = (check for check in self.node["checks"] if check["check"] == name)
        return list(check["results"])


class Machine:
    """Roots of `/sys` and `/dev`, and simulated GPUs."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        *,
        gpus: int = 8,
        profile: str = "h100",
    ) -> None:
        """With GPUs, NVML is the simulator."""
        self.directory = directory
        self.sys, self.dev = directory / "sys", directory / "dev"
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        (self.sys / "fs").mkdir()
        self.dev.mkdir()
        self.simulator = Simulator(directory / "simulator", gpus=gpus or 1, profile=profile)
        if gpus:
            self.simulator.pci_sysfs(self.sys)
        for name, value in self.simulator.environment().items():
            monkeypatch.setenv(name, value)
        # A slurmd of the machine that the tests run on has that one's limits.
        monkeypatch.setattr(limits, "LAUNCHERS", frozenset())
        self._capsys = capsys
        self.config = directory / "dshealthd.toml"
        self.config.write_text("", encoding="utf-8")

    def add_infiniband(self, *leave_out: str) -> None:
        """Give it the adapters of the fixture, two NDR ports and some odd ones."""
        shutil.copytree(FIXTURES / "infiniband/sys", self.sys, symlinks=True, dirs_exist_ok=True)
        for name in leave_out:
            (self.sys / "class/infiniband" / name).unlink()

    def arguments(self, *arguments: str) -> list[str]:
        """Return the arguments of the command on this machine."""
        return ["doctor", "--no-agent", *self.paths, *arguments]

    @property
    def paths(self) -> list[str]:
        """The arguments by which a command finds this machine."""
        return [
            "--config.file",
            str(self.config),
            "--path.sysfs",
            str(self.sys),
            "--path.dev",
            str(self.dev),
            "--path.state",
            str(self.directory / "state"),
        ]

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run the command and return its status and its output."""
        return self._run(self.arguments(*arguments))

    def _run(self, arguments: list[str]) -> tuple[int, str]:
        self._capsys.readouterr()
        status = cli.main(arguments)
        return status, self._capsys.readouterr().out

    def examine(self, *arguments: str) -> Answer:
        """Return what it says, without the checks of the machine that the tests run on."""
        status, output = self.run("--json", "--skip", OF_THIS_MACHINE, *arguments)
        return Answer(status, json.loads(output))

    def ask(self, port: int) -> Answer:
        """Return what it says beside an agent that serves there."""
        own = "--config.file", str(self.config), "--web.listen-address", f"127.0.0.1:{port}"
        status, output = self._run(["doctor", "--json", "--skip", OF_THIS_MACHINE, *own])
        return Answer(status, json.loads(output))
