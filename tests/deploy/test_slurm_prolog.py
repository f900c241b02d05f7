"""Slurm's prolog in a real Slurm: which jobs start, and which nodes it drains."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.deploy.slurm_nodes import REASON, cluster, job_node, job_state

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.node import Node

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]


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
