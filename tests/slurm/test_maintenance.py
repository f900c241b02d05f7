"""Maintenance as Slurm tells it: the node's drain or MAINT state, for the agent to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dshealthd.cli import main as cli
from dshealthd.findings.finding import Verdict
from dshealthd.maintenance.file import FILES, parse
from dshealthd.slurm.agent import judge
from dshealthd.slurm.controller import Controller, ControllerError, SlurmNode
from dshealthd.slurm.maintenance import keep
from dshealthd.slurm.options import DRAIN_FOR
from tests.findings.player import scene
from tests.slurm.cluster import NOW, node
from tests.slurm.test_check import Node, times
from tests.slurm.test_controller import LINES, sinfo, tool

MAX_REASON = 80


class Slurm(Controller):
    """A controller that knows one node."""

    def __init__(self, known: SlurmNode | None) -> None:
        super().__init__()
        self.known = known

    def node(self, name: str) -> SlurmNode | None:
        """Return it."""
        assert name == "n1"
        return self.known


@pytest.mark.parametrize(("state", "reason", "said"), [
    ("idle+drain", "PSU exchange", "PSU exchange"),
    ("allocated+drain", "", "drained"),
    ("idle+maintenance", "", "MAINT reservation"),
    ("idle+maint", "", "MAINT reservation"),
    ("down+drain", "new\tBIOS", "new?BIOS"),
    ("idle+drain", "x" * 200, "x" * MAX_REASON),
    ("idle+drain", "dshealthd: gpu-lost gpu=3", None),  # broken, and told
    ("idle+drain", "Kill task failed", None),
    ("idle+drain", "gres/gpu count reported lower than configured (7 < 8)", None),
    ("idle+drain", "NHC: check_hw_ib: no ACTIVE ports", None),
    ("idle", "", None),
    ("allocated", "", None),
    ("down", "not responding", None),
])  # fmt: skip
def test_states(tmp_path: Path, state: str, reason: str, said: str | None) -> None:
    """Drained by somebody else, or in a MAINT reservation, is maintenance; a fault is none."""
    keep(tmp_path, Slurm(node("n1", state, reason)), "n1", NOW)
    place = tmp_path / FILES["slurm"]
    found = parse(place.read_text(encoding="utf-8")) if place.exists() else None
    assert (None if found is None else found.reason) == said
    if found is not None:
        assert (found.begin, found.end) == (NOW, NOW + 86_400)


def test_drain_for_a_lost_gpu_holds_no_page_back(tmp_path: Path) -> None:
    """A GPU is lost under a job, which is a page; two checks drain the node for it. That is no
    maintenance, which would hold the page back; a drain by an operator after it is.
    """
    samples = (
        'dshealthd_job_gpu_info{training_job="llama", rank="3", gpu="3", uuid="G"} 1x6',
        'dshealthd_gpu_fault{gpu="3", uuid="G", reason="gpu_lost"} _x2 1x4',
    )
    *_, (_, findings) = scene({"every": "15s", "samples": samples}).play("n1", 60)
    assert [(finding.severity, finding.training_job) for finding in findings] == [
        ("critical", "llama")
    ]
    told = Verdict(tuple(findings)).document() | {"findings": findings}
    verdict = told | {"ready": True}
    checked = Node(node("n1"), node("n2"))
    times(2, lambda: checked.check(judge(verdict, frozenset(DRAIN_FOR))))
    drained = checked.cluster.table["n1"]
    assert (drained.state.drained, drained.reason) == (True, "dshealthd: gpu-lost gpu=3")
    place = tmp_path / FILES["slurm"]
    for reason, exists in ((drained.reason, False), ("RMA of GPU 3", True)):
        keep(tmp_path, Slurm(replace(drained, reason=reason)), "n1", NOW)
        assert place.exists() == exists


def test_it_is_renewed_and_ends(tmp_path: Path) -> None:
    """It counts for a day after the last query, begins once, and ends with the drain."""
    place = tmp_path / FILES["slurm"]
    drained = Slurm(node("n1", "idle+drain", "PSU"))
    keep(tmp_path, drained, "n1", NOW)
    first = place.read_bytes()
    keep(tmp_path, drained, "n1", NOW + 8639)
    assert place.read_bytes() == first  # not at every check
    keep(tmp_path, drained, "n1", NOW + 8641)
    later = parse(place.read_text(encoding="utf-8"))
    assert (later.begin, later.end) == (NOW, NOW + 8641 + 86_400)
    keep(tmp_path, drained, "n1", NOW + 8641 + 86_401)
    assert parse(place.read_text(encoding="utf-8")).begin == NOW + 8641 + 86_401  # had ended
    keep(tmp_path, Slurm(node("n1")), "n1", NOW + 60)
    assert not place.exists()
    keep(tmp_path, Slurm(None), "n1", NOW)  # of no partition: nothing is known of it


def test_one_node_is_asked_for(tmp_path: Path) -> None:
    """The command asks for this node alone, not for the cluster."""
    slurm = sinfo(tmp_path, LINES.splitlines()[2])
    found = slurm.node("n2")
    assert found is not None
    assert found.ours
    assert "--nodes=n2" in (tmp_path / "asked").read_text(encoding="utf-8")
    assert slurm.node("n9") is None


def test_a_controller_that_fails_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where slurmctld is down, what was known stands, and the hook says so and ends well."""
    keep(tmp_path, Slurm(node("n1", "idle+drain", "PSU")), "n1", NOW)
    before = (tmp_path / FILES["slurm"]).read_bytes()
    slurm = tool(tmp_path, "sinfo", "echo down >&2; exit 1")
    with pytest.raises(ControllerError):
        keep(tmp_path, slurm, "n1", NOW + 86_400)
    flags = {
        "--slurm.node": "n1",
        "--slurm.bin-directory": str(tmp_path),
        "--slurm.run-directory": str(tmp_path / "run"),
        "--path.state": str(tmp_path),
        "--web.listen-address": "127.0.0.1:1",
    }
    assert cli.main(["slurm", "health", *(word for flag in flags.items() for word in flag)]) == 0
    assert "maintenance is not known: sinfo --all: down" in capsys.readouterr().err
    assert (tmp_path / FILES["slurm"]).read_bytes() == before
