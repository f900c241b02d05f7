"""Slurm's hooks in a real Slurm: who is drained, with which reason, and who is not.

The findings are those of stub agents, which answer with a file; the rest is what a cluster runs:
Debian's slurmctld and slurmd, the programs of `deploy/slurm/`, and the `dshealthd` that they call.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from dshealthd.slurm.check import LOOK_AGAIN
from tests.deploy.machine import LONGEST
from tests.deploy.slurm_nodes import REASON, cluster, job_node, job_state, program
from tests.lab.hardware import gpu_lost

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]


def test_bad_gpu_drains_its_node(tmp_path: Path) -> None:
    """A lost GPU drains its node within 60 s, by name; a job there goes on, and the others stay."""
    with cluster(tmp_path, 3) as made:
        first, *others = made.lab.nodes
        job = made.slurm.command(
            *("sbatch", "--parsable", "-w", first.name, "-o", "/dev/null", "--wrap", "sleep 90")
        ).strip()
        made.slurm.wait(lambda: job_state(made, job) == "RUNNING", 300, "the job runs")
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
        made.begin_agents()
        made.await_checks(first, 2)
        assert set(made.slurm.states().values()) == {"idle"}
        with gpu_lost(first, 3), gpu_lost(second, 3):
            second.kill()
            print(f"drained after {made.await_drain(first, 300):.1f} s")
            assert made.slurm.show(first)["Reason"].startswith("dshealthd: gpu-lost gpu=3")
            made.await_checks(second, 2)
            assert made.slurm.states()[second.name] == "idle"


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
        said = (tmp_path / f"{hung.name}.health.err").read_text()
        assert "no process of this machine has accepted the connection" in said
        assert "refused" in (tmp_path / f"{dead.name}.health.err").read_text()


@pytest.mark.parametrize(("options", "budget"), [("", 1), ("budget_ratio = 0.15", 3)])
def test_budget(tmp_path: Path, options: str, budget: int) -> None:
    """Of ten nodes of twenty that are bad at once, only the budget's are drained, at any moment."""
    with cluster(tmp_path, 20, options=options, interval=30) as made:
        bad = made.lab.nodes[:10]
        for node in bad:
            made.bad(node)
        most = 0
        end = time.monotonic() + 1200
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


def test_administrator(tmp_path: Path) -> None:
    """A reason and a comment by an administrator stay; our note goes once the node is well."""
    with cluster(tmp_path, 3) as made:
        first, second, third = made.lab.nodes
        made.slurm.command(
            *("scontrol", "update", f"NodeName={first.name}", "State=DRAIN", "Reason=bad cable")
        )
        made.slurm.command("scontrol", "update", f"NodeName={second.name}", "Comment=rack 7")
        made.bad(first)
        made.await_checks(first, 3)
        assert made.slurm.show(first)["Reason"] == "bad cable"
        made.bad(second)
        made.await_drain(second, 300)
        assert made.slurm.show(second)["Reason"] == REASON
        made.bad(third)
        made.slurm.wait(
            lambda: "budget" in made.slurm.show(third).get("Comment", ""), 300, "a note on it"
        )
        for node in made.lab.nodes:
            made.well(node)
        assert made.slurm.show(second)["Comment"] == "rack 7"
        made.slurm.wait(lambda: "Comment" not in made.slurm.show(third), 300, "the note is gone")
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
            made.slurm.signal_controller(signal.SIGSTOP)
        made.bad(first)
        for _ in range(3):
            check = first.station.popen(
                [str(tmp_path / "health")], stdin=subprocess.DEVNULL, env={}
            )
            assert check.wait(300) == 0
            time.sleep(LOOK_AGAIN)
        print(f"checks with slurmctld {how}: {made.checks(first)}")
        assert max(made.checks(first)) < 8  # 2 s for a command; the machine may be loaded
        said = (tmp_path / f"{first.name}.health.err").read_text()
        assert "Slurm does not answer" in said
        if how == "down":
            made.slurm.start_controller()
        else:
            made.slurm.signal_controller(signal.SIGCONT)
        made.await_drain(first, 300)
        assert made.slurm.show(first)["Reason"] == REASON


def test_prolog_sends_the_job_elsewhere(tmp_path: Path) -> None:
    """A job on a node with a lost GPU is requeued elsewhere, with our reason; beyond the budget it
    starts.
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
        made.slurm.wait(lambda: job_state(made, job) == "COMPLETED", 300, "the job completes")
        assert job_node(made, job) != first.name
        shown = made.slurm.show(first)
        assert "DRAIN" in shown["State"]
        assert shown["Reason"] == REASON
        for node in (second, third):
            made.bad(node)
        job = made.slurm.command(
            *("sbatch", "--parsable", "-N1", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        ).strip()
        made.slurm.wait(lambda: job_state(made, job) == "COMPLETED", 300, "the job completes")
        states = made.slurm.states()
        assert [states[node.name] for node in (second, third)] == ["idle", "idle"]
