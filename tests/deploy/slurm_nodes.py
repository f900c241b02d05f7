"""Nodes of a lab with slurmd, an agent each, and the shipped programs in slurm.conf."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import status_documents
from tests.command_line import shell_script
from tests.deploy.slurm import CHECK_SECONDS, SlurmCluster, require
from tests.lab.lab import Lab
from tests.lab.node import PORT, Node

DEPLOY = Path(__file__).parents[2] / "deploy" / "slurm"
STUB = Path(__file__).with_name("stub_agent.py")
TIMED = Path(__file__).with_name("timed_command.py")
REASON = "dshealthd: gpu-lost gpu=3 xid=79"


class Cluster:
    """Nodes with slurmd and a stub agent each."""

    def __init__(self, lab: Lab, slurm: SlurmCluster, directory: Path) -> None:
        self.lab, self.slurm, self.directory = lab, slurm, directory
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Start a healthy agent on every node."""
        for node in self.lab.nodes:
            self.well(node)
            command = [sys.executable, "-I", "-S", str(STUB), node.address, str(PORT)]
            self.agents[node.name] = node.station.popen(
                [*command, str(self._document(node))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        for node in self.lab.nodes:
            self.slurm.wait(functools.partial(listens, node), 300, "the agents")

    def begin_agents(self) -> None:
        """Start a real agent on every node in place of its stub."""
        for node in self.lab.nodes:
            self.agents[node.name].kill()
            self.agents[node.name].wait()
            node.begin()
        for node in self.lab.nodes:
            node.finish()

    def _document(self, node: Node) -> Path:
        return self.directory / f"{node.name}.json"

    def _write(self, node: Node, **other: object) -> None:
        text = json.dumps(status_documents.document(time=time.time(), **other))
        new = self._document(node).with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(self._document(node))

    def well(self, node: Node) -> None:
        """Have the agent find nothing."""
        self._write(node)

    def bad(self, node: Node) -> None:
        """Have the agent find a GPU lost."""
        findings = [status_documents.finding(reason="Xid 79")]
        self._write(node, verdict="critical", findings=findings)

    def checks(self, node: Node) -> list[float]:
        """Return how long each check of the node took, in seconds."""
        place = self.directory / f"{node.name}.checks"
        return [float(line) for line in place.read_text().split()] if place.exists() else []

    def await_checks(self, node: Node, number: int) -> None:
        """Wait for so many more checks of a node."""
        before = len(self.checks(node))
        self.slurm.wait(
            lambda: len(self.checks(node)) >= before + number,
            (number + 2) * CHECK_SECONDS * 12,
            f"{number} checks of {node.name}",
        )

    def await_drain(self, node: Node, seconds: float = 60) -> float:
        """Wait until a node is drained with our reason; return after how many seconds."""
        return self.slurm.wait(
            lambda: "DRAIN" in self.slurm.show(node)["State"], seconds, f"{node.name} is drained"
        )


def listens(node: Node) -> bool:
    """Tell whether something answers at the place of a node's agent."""
    try:
        node.connect((node.address, PORT)).close()
    except ConnectionRefusedError:
        return False
    return True


def program(directory: Path, hook: str) -> Path:
    """Write what slurm.conf names: the shipped program, with the paths of this test.

    Each run notes how long it took; slurmd gives it neither PATH nor HOME.
    """
    tools = directory / "bin"
    command = shell_script(tools / "dshealthd", f'exec {sys.executable} {TIMED} "$NOTES" "$@"')
    return shell_script(
        directory / hook,
        f"export PATH={tools}:/usr/bin:/bin PYTHONPATH={DEPLOY.parents[1]}\n"
        "name=$(/bin/hostname)\n"
        f"export DSHEALTHD_CONFIG={directory}/lab/$name/dshealthd.toml\n"
        f"export NOTES={directory}/$name.checks\n"
        f"[ -x {command} ] || echo 0 >>$NOTES\n"  # a node without dshealthd has its checks, too
        f"{DEPLOY}/dshealthd-{hook} 2>>{directory}/$name.{hook}.err",
    )


@contextmanager
def cluster(
    directory: Path,
    nodes: int,
    *,
    options: str = "",
    hooks: tuple[str, ...] = ("health",),
    interval: int = CHECK_SECONDS,
    **lines: str,
) -> Iterator[Cluster]:
    """Run a cluster; `options` are lines of the table [slurm]."""
    require()
    keys = {"health": "HealthCheckProgram", "prolog": "Prolog", "epilog": "Epilog"}
    programs = {keys[hook]: str(program(directory, hook)) for hook in hooks}
    if "health" in hooks:
        programs |= {"HealthCheckInterval": str(interval)}

    def configured(node: Node) -> str:
        return (
            f'[web]\nlisten_address = "{node.address}:{PORT}"\n'
            f'[slurm]\nconf_file = "{directory}/slurm/slurm.conf"\n'
            f'run_directory = "{directory}/{node.name}.run"\n{options}\n'
        )

    with (
        Lab(directory / "lab", nodes, start=False, config=configured) as lab,
        SlurmCluster(lab, directory / "slurm", programs={**programs, **lines}) as slurm,
    ):
        made = Cluster(lab, slurm, directory)
        made.begin()
        yield made


def job_state(made: Cluster, job: str) -> str:
    """Return the state of a job."""
    return made.slurm.command("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]


def job_node(made: Cluster, job: str) -> str:
    """Return where a job runs or ran."""
    return made.slurm.command("scontrol", "show", "job", job).partition(" NodeList=")[2].split()[0]
