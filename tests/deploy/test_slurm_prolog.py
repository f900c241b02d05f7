"""Slurm's prolog in a real Slurm: which jobs start, and which nodes it drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.machine import LONGEST
from tests.deploy.slurm_nodes import REASON, cluster, job_node, job_state

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]


def test_prolog_sends_the_job_elsewhere(tmp_path: Path) -> None:
    """A job on a node with a lost GPU is requeued elsewhere, with our reason; beyond the budget it starts."""
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
