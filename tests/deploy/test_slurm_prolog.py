"""Slurm's prolog in a real Slurm: which jobs start, and which nodes it drains."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.deploy.machine import LONGEST
from tests.deploy.slurm_nodes import REASON, cluster, job_node, job_state
from tests.lab.faults import pause
from tests.lab.probing import KEY, PORT, secret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.deploy.slurm_nodes import Cluster
    from tests.lab.node import Node

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]


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


def asking(nodes: int, **probe: str) -> Callable[[Node], str]:
    """Return the options of a node whose prolog asks the others, which are so many in all."""
    names = [f"node-{number}" for number in range(1, nodes + 1)]

    def options(node: Node) -> str:
        table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in probe.items())
        return (
            f"prolog_probe = true\n[probe]\n{table}[probe.members]\nnodes = {json.dumps(names)}\n"
            f'name = "{node.name}"\n[probe.peer]\nlisten_address = "{node.address}:{PORT}"\n'
            f'key_file = "{secret(node, KEY)}"\n'
        )

    return options


def submit(made: Cluster) -> str:
    """Submit a job that takes all nodes, and return its number."""
    command = ("sbatch", "--parsable", "--requeue", "--exclusive", "-o", "/dev/null")
    return made.slurm.command(*command, f"-N{len(made.lab.nodes)}", "--wrap", "true").strip()


def lost(condition: str) -> dict[str, list[str]]:
    """Return rules by which a node loses what it sends to the agents of others."""
    return {"output": [f"tcp dport {PORT} {condition} drop"]}


def test_prolog_asks_the_nodes_of_the_job(tmp_path: Path) -> None:
    """Where told to, the prolog asks the other nodes of its job; one that is cut off is drained.

    No agent listens for peers: a refusal is a sign of life, and drains nobody.
    """
    with cluster(
        tmp_path,
        3,
        hooks=("prolog",),
        options=asking(3),
        SchedulerParameters="nohold_on_prolog_fail",
    ) as made:
        first, *others = made.lab.nodes
        job = submit(made)
        made.slurm.wait(lambda: job_state(made, job) == "COMPLETED", 300, "the job completes")
        for node in made.lab.nodes:
            said = made.said(node, "prolog")
            assert "0 of 2 nodes of the job answered; " in said
            assert said.count(" refused") == 2
        with made.lab.rules(first.station, "inet", lost("")):
            job = submit(made)
            made.await_drain(first, 300)
            assert made.slurm.show(first)["Reason"] == "dshealthd: node-cut-off peers=0/2"
            states = made.slurm.states()
            assert not [node.name for node in others if "dra" in states[node.name]]
            made.slurm.wait(lambda: len(made.checks(first)) >= 2, 300, "the prolog ends")
        print(f"prologs: {made.checks(first)}")
        assert max(made.checks(first)) < 10
        made.slurm.command("scancel", job)


def test_prolog_of_eight_nodes(tmp_path: Path) -> None:
    """Eight agents exchange data before a job: nothing is wrong, one loses data, all are hung.

    A machine without a CPU for eight prologs at once learns nothing from one job; others follow.
    """
    with cluster(
        tmp_path,
        8,
        hooks=("prolog",),
        options=asking(8, period="1h"),
        SchedulerParameters="nohold_on_prolog_fail",
    ) as made:
        nodes = made.lab.nodes
        made.begin_agents()

        def until(condition: Callable[[], bool], what: str) -> None:
            """Submit one job after the other until a condition holds."""
            end = time.monotonic() + 1200
            while not condition():
                assert time.monotonic() < end, what
                made.slurm.wait(idle, 300, "all nodes are idle")
                for node in nodes:
                    (tmp_path / f"{node.name}.prolog.err").unlink(missing_ok=True)
                job = submit(made)
                made.slurm.wait(
                    lambda job=job: job_state(made, job) == "COMPLETED" or drained(),  # type: ignore[misc] # bound here
                    300,
                    what,
                )
                print(what, {node.name: made.checks(node)[-1:] for node in nodes})
                if job_state(made, job) != "COMPLETED":
                    made.slurm.command("scancel", job)

        def reasons() -> dict[str, str]:
            drains = [node for node in nodes if "dra" in made.slurm.states().get(node.name, "")]
            return {node.name: made.slurm.show(node).get("Reason", "") for node in drains}

        def drained() -> list[str]:
            return [name for name, why in reasons().items() if why.startswith("dshealthd")]

        def idle() -> bool:
            # Where a prolog failed, Slurm itself drains too; that may come after our drain is over.
            for name, why in reasons().items():
                if not why.startswith("dshealthd"):
                    made.slurm.command("scontrol", "update", f"NodeName={name}", "State=RESUME")
            return set(made.slurm.states().values()) == {"idle"}

        def echoes(node: Node) -> float:
            requests = "dshealthd_probe_peer_requests_total"
            return sum(node.scrape().all(requests, method="echo", result="ok"))

        def fine() -> bool:
            return all(echoes(node) >= 14 and not made.said(node, "prolog") for node in nodes)

        until(fine, "all nodes exchange data")
        assert not drained()

        first, *others = nodes
        with made.lab.rules(first.station, "inet", lost("meta length > 1400")):
            until(lambda: bool(drained()), "a node that loses data is drained")
            assert drained() == [first.name]
            assert made.slurm.show(first)["Reason"] == "dshealthd: bulk-transfer-failed peers=0/7"
        made.slurm.command("scontrol", "update", f"NodeName={first.name}", "State=RESUME")

        with contextlib.ExitStack() as stack:
            for node in nodes:
                stack.enter_context(pause(node.agent.process.pid))
            answered = "0 of 7 nodes of the job answered; "
            until(
                lambda: all(answered in made.said(node, "prolog") for node in nodes),
                "hung agents are named",
            )
            assert not drained()
        assert made.said(others[0], "prolog").count(" no_answer") == 7
