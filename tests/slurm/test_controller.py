"""Slurm's commands: what they print is read, and none is waited for; states of nodes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dshealthd.slurm import controller
from dshealthd.slurm.controller import Controller, ControllerError, SlurmNodeState, parse_nodes
from tests.command_line import shell_script
from tests.processes import runs
from tests.slurm.cluster import node
from tests.waiting import until

SHIPPED = controller.TIMEOUT
MARK = "\x1f0123456789abcdef"
LINES = (
    "n1\x1fidle\x1fUnknown\x1f(null)\x1fnone\x1f(null)\x1f\n"
    "n1\x1fidle\x1fUnknown\x1f(null)\x1fnone\x1f(null)\x1f\n"
    "n2\x1fidle+drain\x1f2027-01-15T08:00:00\x1fgpu:h100:8(S:0-1)"
    "\x1fdshealthd: gpu-lost gpu=3\x1frack 7\x1f\n"
    "n3\x1fmixed\x1fUnknown\x1fnic:2,gpu:8"
    "\x1fnone\x1frack 7 [dshealthd: claim ticket=2 time=5]\x1f\n"
).replace("\x1f", MARK)


def tool(directory: Path, name: str, text: str) -> Controller:
    """Return a controller whose command of this name is a shell script."""
    shell_script(directory / name, text)
    return Controller(bin_directory=directory, environment={})


def sinfo(directory: Path, printed: str) -> Controller:
    """Return a controller whose sinfo prints this in UTC, and notes its arguments in `asked`."""
    (directory / "printed").write_text(printed, encoding="utf-8")
    script = (
        f'cd {directory}; echo "$*" > asked; mark=${{*#*NodeList:}}; mark=${{mark%%,*}}\n'
        f'[ "$TZ" = UTC ] && sed "s/{MARK}/$mark/g" printed'
    )
    return tool(directory, "sinfo", script)


def test_nodes(tmp_path: Path) -> None:
    """A node of several partitions is one; times are UTC; our note is apart from the comment."""
    nodes = sinfo(tmp_path, LINES).nodes()
    assert list(nodes) == ["n1", "n2", "n3"]
    assert (nodes["n1"].reason, nodes["n1"].since, nodes["n1"].comment) == ("", 0, "")
    assert (nodes["n2"].ours, nodes["n2"].since) == (True, 1_800_000_000)
    assert (nodes["n3"].comment, nodes["n3"].note) == ("rack 7", "claim ticket=2 time=5")
    assert [node.gpus for node in nodes.values()] == [False, True, True]


@pytest.mark.parametrize("text", [
    "slurm_load_node error\n",
    f"n1{MARK}idle{MARK}\n",
    f"{MARK}idle{MARK * 5}\n",
    LINES + "half",
])  # fmt: skip
def test_lines_that_are_no_nodes(text: str) -> None:
    """A list that is not understood as a whole counts no budget, so that it is not used."""
    with pytest.raises(ControllerError):
        parse_nodes(text, MARK)


def test_text_of_an_operator_between_the_fields() -> None:
    """A reason and a comment hold line breaks and control characters; no node gains or loses one.
    As sinfo 22.05 printed a reason and a comment that scontrol had set.
    """
    text = (
        f"gpu1{MARK}allocated+drain{MARK}2026-11-26T00:17:27{MARK}gpu:8{MARK}r\x1fs\nt{MARK}c\x1fd\ne{MARK}\n"
        f"gpu2{MARK}mixed{MARK}Unknown{MARK}gpu:8{MARK}none{MARK}(null){MARK}\n"
    )
    nodes = parse_nodes(text, MARK)
    assert list(nodes) == ["gpu1", "gpu2"]
    assert (nodes["gpu1"].reason, nodes["gpu1"].comment) == ("r\x1fs\nt", "c\x1fd\ne")


def test_the_separator_differs_between_calls(tmp_path: Path) -> None:
    """Nobody can write it into a comment beforehand."""
    slurm = sinfo(tmp_path, LINES)
    asked = []
    for _ in range(2):
        slurm.nodes()
        asked.append((tmp_path / "asked").read_text())
    assert asked[0] != asked[1]


def test_command_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command is killed after two seconds, with what it has started."""
    monkeypatch.setattr(controller, "TIMEOUT", SHIPPED)
    started = tmp_path / "pid"
    started.touch()
    slurm = tool(tmp_path, "sinfo", f"sleep 1000 & echo $! > {started}; wait")

    def communicate(process: subprocess.Popen[str], timeout: float) -> None:
        until(started.read_bytes)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(ControllerError, match="no answer within 2 s"):
        slurm.nodes()
    pid = int(started.read_text())
    until(lambda: not runs(pid))


def test_command_that_fails(tmp_path: Path) -> None:
    """What a command complains about is passed on; a missing one is said."""
    slurm = tool(tmp_path, "scontrol", "echo 'Invalid user id' >&2; exit 1")
    with pytest.raises(ControllerError, match="scontrol update: Invalid user id"):
        slurm.set_note(node("n1"), "")
    with pytest.raises(ControllerError, match="No such file"):
        Controller(environment={"PATH": str(tmp_path)}).nodes()


def test_changes(tmp_path: Path) -> None:
    """What is asked of scontrol, word for word."""
    slurm = tool(tmp_path, "scontrol", f"printf '%s|' \"$@\" >> {tmp_path}/calls")
    slurm.set_note(node("n1", comment="rack 7"), "hello")
    slurm.set_note(node("n1"), "")
    slurm.drain(node("n1", comment="rack 7", note="x"), "dshealthd: gpu-lost gpu=3")
    assert (tmp_path / "calls").read_text().split("update|")[1:] == [
        "NodeName=n1|Comment=rack 7 [dshealthd: hello]|",
        "NodeName=n1|Comment=|",
        "NodeName=n1|State=DRAIN|Reason=dshealthd: gpu-lost gpu=3|Comment=rack 7|",
    ]


@pytest.mark.parametrize(("file", "given", "used"), [
    (Path("/a"), {"SLURM_CONF": "/b"}, "/a"),
    (None, {"SLURM_CONF": "/b"}, "/b"),
    (None, {}, "its own"),
])  # fmt: skip
def test_which_slurm_conf(
    tmp_path: Path, file: Path | None, given: dict[str, str], used: str
) -> None:
    """The configured one, that of the hook's environment, or where Slurm's commands look."""
    shell_script(tmp_path / "scontrol", f'echo "${{SLURM_CONF-its own}}" > {tmp_path}/used')
    slurm = Controller(conf_file=file, bin_directory=tmp_path, environment=given)
    slurm.set_note(node("n1"), "")
    assert (tmp_path / "used").read_text().strip() == used


@pytest.mark.parametrize(("text", "drained", "working"), [
    ("idle", False, True),
    ("allocated", False, True),
    ("mixed+planned", False, True),
    ("idle+not_responding", False, True),
    ("ALLOCATED+COMPLETING", False, True),
    ("idle+cloud", False, True),
    ("idle+dynamic_norm", False, True),
    ("idle+drain", True, False),
    ("allocated+drain+reboot_requested", True, False),
    ("idle+drain+not_responding", True, False),
    ("down+drain", True, False),
    ("idle+reboot_issued", False, False),
    ("mixed+powering_up", False, False),
    ("idle+powered_down", False, False),
    ("idle+maintenance+reserved", False, False),
    ("down+not_responding", False, False),
    ("idle+fail", False, False),
    ("unknown", False, False),
    ("future", False, False),
    ("idle+something_new", False, False),
    ("", False, False),
])  # fmt: skip
def test_states_of_nodes(text: str, *, drained: bool, working: bool) -> None:
    """A node is touched only where it takes jobs; an unknown flag is somebody's work."""
    state = SlurmNodeState.parse(text)
    assert (state.drained, state.working) == (drained, working)
