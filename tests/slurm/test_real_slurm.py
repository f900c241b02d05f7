"""What operators write to nodes of a real Slurm, as the controller reads it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.maintenance.file import FILES
from dshealthd.slurm.controller import Controller
from dshealthd.slurm.maintenance import keep
from tests.deploy.slurm import SlurmCluster, require
from tests.lab.lab import Lab
from tests.slurm.test_task_prolog import GPUS


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmCluster]:
    """A cluster of two nodes, in namespaces of their own; skips where that is not possible."""
    require()
    with (
        Lab(tmp_path / "lab", 2, start=False) as lab,
        SlurmCluster(lab, tmp_path / "slurm", gpus=GPUS) as cluster,
    ):
        yield cluster


def test_text_of_an_operator_on_a_node(slurm: SlurmCluster) -> None:
    """A node's reason and comment may hold line breaks and control characters."""
    node = slurm.lab.nodes[0].name
    changes = ("State=DRAIN", "Reason=r\x1fs\nt", "Comment=c\x1fd\ne")
    slurm.command("scontrol", "update", f"NodeName={node}", *changes)
    found = slurm.lab.services.inside(Controller(conf_file=slurm.conf).nodes)
    assert list(found) == ["node-1", "node-2"]
    assert (found[node].reason, found[node].comment) == ("r\x1fs\nt", "c\x1fd\ne")
    assert found[node].state.drained
    assert found[node].gpus
    assert (
        slurm.lab.services.inside(lambda: Controller(conf_file=slurm.conf).node(node))
        == (found[node])
    )


def test_a_reservation_for_maintenance_is_maintenance(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A node in a reservation of type MAINT is in maintenance, by the words of a real sinfo."""
    node = slurm.lab.nodes[0].name
    when = ("StartTime=now", "Duration=60", "Users=root", "Flags=MAINT")
    slurm.command("scontrol", "create", "reservation", *when, f"Nodes={node}")
    controller = Controller(conf_file=slurm.conf)
    slurm.wait(
        lambda: "RESERVED" in slurm.command("scontrol", "show", "node", node), 60, "it is reserved"
    )
    slurm.lab.services.inside(lambda: keep(tmp_path, controller, node, time.time()))
    assert (tmp_path / FILES["slurm"]).exists()
