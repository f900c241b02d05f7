"""What Prometheus is to scrape, made of the members: as a list, by the command, and over HTTP."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from dshealthd.cli.main import main
from dshealthd.probe.members.membership import Member, Membership
from dshealthd.probe.members.targets import document
from tests.agents import running

HOSTS = "node-1 slots=8\nnode-2 slots=8\n"
BOTH = [
    {"targets": ["node-1:10061"], "labels": {"node": "node-1"}},
    {"targets": ["node-2:10061"], "labels": {"node": "node-2"}},
]


def made(names: tuple[str, ...], leaves: Mapping[str, str]) -> object:
    """Return the list of targets for members, read back."""
    return json.loads(document(Membership(tuple(map(Member, names)), leaves, "list"), 9100))


def test_a_target_for_each_member() -> None:
    """Every member is a target with its name as label, its leaf where that is known, and brackets
    around an IPv6 address.
    """
    assert made(("10.0.0.1", "fd00::1", "n1"), {"n1": "leaf-a"}) == [
        {"targets": ["10.0.0.1:9100"], "labels": {"node": "10.0.0.1"}},
        {"targets": ["[fd00::1]:9100"], "labels": {"node": "fd00::1"}},
        {"targets": ["n1:9100"], "labels": {"node": "n1", "leaf": "leaf-a"}},
    ]


def test_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dshealthd targets` prints the members of a hostfile, each on a line, at the port that is
    configured.
    """
    (tmp_path / "hostfile").write_text(HOSTS)
    assert main(["targets", "--hostfile", str(tmp_path / "hostfile")]) == 0
    said = capsys.readouterr().out
    assert json.loads(said) == BOTH
    assert len(said.splitlines()) == 4
    assert (
        main(["targets", "--hostfile", str(tmp_path / "hostfile"), "--web.listen-address", ":7"])
        == 0
    )
    assert [entry["targets"] for entry in json.loads(capsys.readouterr().out)] == [
        ["node-1:7"],
        ["node-2:7"],
    ]


def test_command_takes_the_configured_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a hostfile of its own the command has the members that the probes have, with their
    leaves.
    """
    (tmp_path / "topology").write_text(
        "SwitchName=leaf-a Nodes=node-1\nSwitchName=leaf-b Nodes=node-2\n"
    )
    (tmp_path / "config").write_text(
        f'[probe.members]\nnodes = ["node-2", "node-1"]\ntopology = "{tmp_path}/topology"\n'
    )
    assert main(["targets", "--config.file", str(tmp_path / "config")]) == 0
    assert [entry["labels"] for entry in json.loads(capsys.readouterr().out)] == [
        {"node": "node-1", "leaf": "leaf-a"},
        {"node": "node-2", "leaf": "leaf-b"},
    ]


def test_command_replaces_a_file_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is another one afterwards, readable for all. A hostfile that is wrong leaves it as
    it is and is named.
    """
    hostfile, output = tmp_path / "hostfile", tmp_path / "targets.json"
    output.write_text("[]")
    before = os.stat(output).st_ino
    hostfile.write_text(HOSTS)
    arguments = ["targets", "--hostfile", str(hostfile), "--output", str(output)]
    assert main(arguments) == 0
    assert json.loads(output.read_text()) == BOTH
    assert os.stat(output).st_ino != before
    assert stat.S_IMODE(os.stat(output).st_mode) == 0o644
    absent = tmp_path / "absent" / "targets.json"
    assert main([*arguments[:-1], str(absent)]) == 1
    assert capsys.readouterr().err == f"--output: {absent}: No such file or directory\n"
    hostfile.write_text("node-1 slots=8\nnode-1 slots=8\n")
    assert main(arguments) == 1
    assert capsys.readouterr().err == f'{hostfile}:2: "node-1" is a duplicate of line 1\n'
    assert json.loads(output.read_text()) == BOTH
    assert sorted(os.listdir(tmp_path)) == ["hostfile", "targets.json"]


def test_agent_without_probes_says_so(tmp_path: Path) -> None:
    """An agent that knows no members answers with an error, at which Prometheus keeps the targets
    it has; never with an empty list.
    """
    with running(tmp_path) as agent, pytest.raises(OSError, match="503") as raised:
        agent.get("/api/v1/targets")
    assert "no probes are configured" in str(raised.value)
