"""Slurm's hooks in a real Slurm: who is drained, with which reason, and who is not.

The findings are those of stub agents, which answer with a file; the rest is what a cluster runs:
Debian's slurmctld and slurmd, the programs of `deploy/slurm/`, and the `dshealthd` that they call.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.deploy.slurm import CHECK_SECONDS, SlurmCluster, require
from tests.lab.hardware import gpu_lost
from tests.lab.lab import Lab
from tests.lab.node import PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.node import Node

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "slurm"
STUB = Path(__file__).with_name("stub_agent.py")
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
            self.agents[node.name] = node.station.popen(
                [
                    *(sys.executable, "-I", "-S", str(STUB), node.address, str(PORT)),
                    str(self._document(node)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

        for node in self.lab.nodes:
            self.slurm.wait(lambda node=node: listens(node), 30, "the agents")  # type: ignore[misc] # bound here

    def _document(self, node: Node) -> Path:
        return self.directory / f"{node.name}.json"

    def _write(self, node: Node, **other: object) -> None:
        new = self._document(node).with_suffix(".new")
        new.write_text(json.dumps({"time": time.time(), "schema": 1, **other}), encoding="utf-8")
        new.replace(self._document(node))

    def well(self, node: Node) -> None:
        """Have the agent find nothing."""
        self._write(node, verdict="ok", findings=[])

    def bad(self, node: Node) -> None:
        """Have the agent find a GPU lost."""
        finding = {
            "slug": "gpu-lost",
            "alert": "DshealthdGpuLost",
            "severity": "critical",
            "component": "gpu",
            "part": "GPU 3",
        }
        sample = {"labels": {"gpu": "3", "xid": "79"}, "value": time.time()}
        metrics = {"dshealthd_xid_last_timestamp_seconds": {"samples": [sample]}}
        self._write(node, verdict="critical", findings=[finding], metrics=metrics)

    def checks(self, node: Node) -> list[float]:
        """Return how long each check of the node took, in seconds."""
        place = self.directory / f"{node.name}.checks"
        return [float(line) for line in place.read_text().split()] if place.exists() else []

    def await_checks(self, node: Node, number: int) -> None:
        """Wait for so many more checks of a node."""
        before = len(self.checks(node))
        self.slurm.wait(
            lambda: len(self.checks(node)) >= before + number,
            (number + 2) * CHECK_SECONDS * 3,
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

    It notes how long each run takes; slurmd gives it neither PATH nor HOME.
    """
    tools = directory / "bin"
    tools.mkdir(exist_ok=True)
    command = tools / "dshealthd"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dshealthd "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    place = directory / hook
    place.write_text(
        "#!/bin/bash\n"
        f"export PATH={tools}:/usr/bin:/bin PYTHONPATH={DEPLOY.parents[1]}\n"
        "name=$(/bin/hostname)\n"
        f"export DSHEALTHD_CONFIG={directory}/lab/$name/dshealthd.toml\n"
        "begin=$EPOCHREALTIME\n"
        f"{DEPLOY}/dshealthd-{hook} 2>>{directory}/$name.{hook}.err\n"
        "status=$?\n"
        f"echo $EPOCHREALTIME $begin | awk '{{print $1-$2}}' >>{directory}/$name.checks\n"
        "exit $status\n",
        encoding="utf-8",
    )
    place.chmod(0o755)
    return place


@contextmanager
def cluster(
    directory: Path,
    nodes: int,
    *,
    options: str | Callable[[Node], str] = "",
    hooks: tuple[str, ...] = ("health",),
    interval: int = CHECK_SECONDS,
    **lines: str,
) -> Iterator[Cluster]:
    """Run a cluster; `options` are lines of the table [slurm], or what gives a node's."""
    require()
    keys = {"health": "HealthCheckProgram", "prolog": "Prolog", "epilog": "Epilog"}
    programs = {keys[hook]: str(program(directory, hook)) for hook in hooks}
    if "health" in hooks:
        programs |= {"HealthCheckInterval": str(interval)}

    def configured(node: Node) -> str:
        return (
            f'[web]\nlisten_address = "{node.address}:{PORT}"\n'
            f'[slurm]\nconf_file = "{directory}/slurm/slurm.conf"\n'
            f'run_directory = "{directory}/{node.name}.run"\n{options if isinstance(options, str) else options(node)}\n'
        )

    with (
        Lab(directory / "lab", nodes, start=False, config=configured) as lab,
        SlurmCluster(lab, directory / "slurm", programs={**programs, **lines}) as slurm,
    ):
        if not all(node.has_network for node in lab.nodes):
            pytest.skip("; ".join(lab.limits))
        made = Cluster(lab, slurm, directory)
        made.begin()
        yield made


def test_bad_gpu_drains_its_node(tmp_path: Path) -> None:
    """A lost GPU drains its node within 60 s, by name; a job there goes on, and the others stay."""
    with cluster(tmp_path, 3) as made:
        first, *others = made.lab.nodes
        job = made.slurm.command(
            *("sbatch", "--parsable", "-w", first.name, "-o", "/dev/null", "--wrap", "sleep 90")
        ).strip()
        made.slurm.wait(lambda: job_state(made, job) == "RUNNING", 30, "the job runs")
        made.bad(first)
        seconds = made.await_drain(first)
        print(f"drained after {seconds:.1f} s")
        assert made.slurm.show(first)["Reason"] == REASON
        assert "Comment" not in made.slurm.show(first)
        assert job_state(made, job) == "RUNNING"
        made.await_checks(first, 2)
        assert [made.slurm.states()[node.name] for node in others] == ["idle", "idle"]
        assert job_state(made, job) == "RUNNING"
        quick = [seconds for node in others for seconds in made.checks(node)]
        print(f"checks of healthy nodes: {sorted(quick)}")
        assert sorted(quick)[len(quick) // 2] < 2


def test_real_agent(tmp_path: Path) -> None:
    """The same by a real agent and its NVML, which loses a GPU; killed, the agent drains nobody."""
    with cluster(tmp_path, 2, options="budget_ratio = 1.0") as made:
        first, second = made.lab.nodes
        for node in made.lab.nodes:
            made.agents[node.name].kill()
            made.agents[node.name].wait()
            node.start()
        made.await_checks(first, 2)
        assert set(made.slurm.states().values()) == {"idle"}
        with gpu_lost(first, 3), gpu_lost(second, 3):
            second.kill()
            print(f"drained after {made.await_drain(first):.1f} s")
            assert made.slurm.show(first)["Reason"].startswith("dshealthd: gpu-lost gpu=3")
            made.await_checks(second, 2)
            assert made.slurm.states()[second.name] == "idle"


def job_state(made: Cluster, job: str) -> str:
    """Return the state of a job."""
    output = made.slurm.command("scontrol", "show", "job", job)
    return output.partition("JobState=")[2].split()[0]


def job_node(made: Cluster, job: str) -> str:
    """Return where a job runs or ran."""
    return made.slurm.command("scontrol", "show", "job", job).partition(" NodeList=")[2].split()[0]


def test_prolog_sends_the_job_elsewhere(tmp_path: Path) -> None:
    """A job that is given a node with a lost GPU is requeued and runs on another node.

    The reason is ours, not Slurm's; two jobs on bad nodes beyond the budget start all the same.
    """
    with cluster(
        tmp_path, 3, hooks=("prolog", "epilog"), SchedulerParameters="nohold_on_prolog_fail"
    ) as made:
        first, second, third = made.lab.nodes
        made.bad(first)
        job = made.slurm.command(
            *("sbatch", "--parsable", "-N1", "--requeue", "--exclusive", "-o", "/dev/null"),
            *("--wrap", "sleep 1"),
        ).strip()
        made.slurm.wait(lambda: job_state(made, job) == "COMPLETED", 240, "the job completes")
        assert job_node(made, job) != first.name
        shown = made.slurm.show(first)
        assert "DRAIN" in shown["State"]
        assert shown["Reason"] == REASON
        for node in (second, third):
            made.bad(node)
        job = made.slurm.command(
            *("sbatch", "--parsable", "-N1", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        ).strip()
        made.slurm.wait(lambda: job_state(made, job) == "COMPLETED", 120, "the job completes")
        states = made.slurm.states()
        assert [states[node.name].rstrip("*") for node in (second, third)] == ["idle", "idle"]


def test_prolog_asks_the_nodes_of_the_job(tmp_path: Path) -> None:
    """Where told to, the prolog asks the other nodes of its job; one that is cut off is drained.

    No agent listens for peers: a refusal is a sign of life, and drains nobody.
    """
    key = tmp_path / "probe.key"
    key.write_text("0123456789abcdef" * 4 + "\n", encoding="ascii")
    key.chmod(0o600)
    names = [f"node-{number}" for number in range(1, 4)]

    def options(node: Node) -> str:
        return (
            f"prolog_probe = true\n[probe.members]\nnodes = {json.dumps(names)}\n"
            f'name = "{node.name}"\n[probe.peer]\nlisten_address = "{node.address}:10062"\n'
            f'key_file = "{key}"\n'
        )

    with cluster(
        tmp_path,
        3,
        hooks=("prolog",),
        options=options,
        SchedulerParameters="nohold_on_prolog_fail",
    ) as made:
        first, *others = made.lab.nodes
        submit = ("sbatch", "--parsable", "--requeue", "--exclusive", "-o", "/dev/null")
        job = made.slurm.command(*submit, "-N3", "--wrap", "true").strip()
        made.slurm.wait(lambda: job_state(made, job) == "COMPLETED", 120, "the job completes")
        for node in made.lab.nodes:
            said = (tmp_path / f"{node.name}.prolog.err").read_text()
            assert "0 of 2 nodes of the job answered; " in said
            assert said.count(" refused") == 2
        rules = "table inet cut { chain out { type filter hook output priority 0; "
        rules += "tcp dport 10062 drop; }; }"
        cut = first.station.popen(["nft", rules], stdin=subprocess.DEVNULL)
        assert cut.wait(60) == 0
        job = made.slurm.command(*submit, "-N3", "--wrap", "true").strip()
        made.await_drain(first, 120)
        assert made.slurm.show(first)["Reason"] == "dshealthd: node-cut-off peers=0/2"
        states = made.slurm.states()
        assert not [node.name for node in others if "dra" in states[node.name]]
        made.slurm.wait(lambda: len(made.checks(first)) >= 2, 30, "the prolog ends")
        print(f"prologs: {made.checks(first)}")
        assert max(made.checks(first)) < 10
        made.slurm.command("scancel", job)


def test_agent_that_says_nothing_drains_nobody(tmp_path: Path) -> None:
    """Neither an agent that is dead, nor one that is hung, nor a node without dshealthd."""
    with cluster(tmp_path, 3) as made:
        dead, hung, absent = made.lab.nodes
        for node in made.lab.nodes:
            made.bad(node)
        made.agents[dead.name].kill()
        made.agents[hung.name].send_signal(signal.SIGSTOP)
        (tmp_path / "bin" / "dshealthd").unlink()
        made.await_checks(absent, 4)
        program(tmp_path, "health")
        made.agents[absent.name].kill()
        made.await_checks(dead, 4)
        made.await_checks(hung, 1)
        assert set(made.slurm.states().values()) == {"idle"}
        assert max(made.checks(hung)) < 6
        assert "within 1.5 s" in (tmp_path / f"{hung.name}.health.err").read_text()
        assert "refused" in (tmp_path / f"{dead.name}.health.err").read_text()


@pytest.mark.parametrize(("options", "budget"), [("", 1), ("budget_ratio = 0.15", 3)])
def test_budget(tmp_path: Path, options: str, budget: int) -> None:
    """Of ten nodes of twenty that are bad at once, only the budget's are drained, at any moment."""
    with cluster(tmp_path, 20, options=options, interval=30) as made:
        bad = made.lab.nodes[:10]
        for node in bad:
            made.bad(node)
        most = 0
        end = time.monotonic() + 400
        while min(len(made.checks(node)) for node in bad) < 4:
            assert time.monotonic() < end
            drained = [name for name, state in made.slurm.states().items() if "dra" in state]
            most = max(most, len(drained))
            time.sleep(0.2)
        assert most == budget == len(drained)
        comments = [made.slurm.show(node).get("Comment", "") for node in bad]
        left = [text for text in comments if "not drained, budget of" in text]
        print(comments)
        assert len(left) == 10 - budget
        assert not any("claim" in text for text in comments)
        states = made.slurm.states()
        assert {states[node.name] for node in made.lab.nodes[10:]} == {"idle"}


def test_administrator_and_undrain(tmp_path: Path) -> None:
    """A reason and a comment by an administrator stay; ours is undrained once the node is well."""
    with cluster(tmp_path, 3, options="undrain = true\nclean_checks = 3") as made:
        first, second, third = made.lab.nodes
        made.slurm.command(
            *("scontrol", "update", f"NodeName={first.name}", "State=DRAIN", "Reason=bad cable")
        )
        made.slurm.command("scontrol", "update", f"NodeName={second.name}", "Comment=rack 7")
        made.bad(first)
        made.await_checks(first, 3)
        assert made.slurm.show(first)["Reason"] == "bad cable"
        made.bad(second)
        made.await_drain(second)
        assert made.slurm.show(second)["Reason"] == REASON
        made.bad(third)
        made.slurm.wait(
            lambda: "budget" in made.slurm.show(third).get("Comment", ""), 90, "a note on it"
        )
        for node in made.lab.nodes:
            made.well(node)
        made.slurm.wait(
            lambda: "DRAIN" not in made.slurm.show(second)["State"], 120, "second is undrained"
        )
        shown = made.slurm.show(second)
        assert "Reason" not in shown
        assert shown["Comment"] == "rack 7"
        made.slurm.wait(lambda: "Comment" not in made.slurm.show(third), 60, "the note is gone")
        made.await_checks(first, 4)
        assert made.slurm.show(first)["Reason"] == "bad cable"
        assert "DRAIN" in made.slurm.show(first)["State"]


@pytest.mark.parametrize("how", ["down", "hung"])
def test_controller_that_does_not_answer(tmp_path: Path, how: str) -> None:
    """With slurmctld down or hung a check ends within seconds, and drains once it is back.

    Only slurmctld has slurmd run the health check, so that it is started by hand meanwhile, as
    slurmd itself does before it registers.
    """
    with cluster(tmp_path, 1) as made:
        (first,) = made.lab.nodes
        made.await_checks(first, 1)
        if how == "down":
            made.slurm.stop_controller()
        else:
            made.slurm.hang_controller()
        made.bad(first)
        for _ in range(3):
            check = first.station.popen(
                [str(tmp_path / "health")], stdin=subprocess.DEVNULL, env={}
            )
            assert check.wait(60) == 0
        print(f"checks with slurmctld {how}: {made.checks(first)}")
        assert max(made.checks(first)) < 8  # 2 s for a command; the machine may be loaded
        said = (tmp_path / f"{first.name}.health.err").read_text()
        assert "Slurm does not answer" in said
        if how == "down":
            made.slurm.start_controller()
        else:
            made.slurm.resume_controller()
        made.await_drain(first, 120)
        assert made.slurm.show(first)["Reason"] == REASON
