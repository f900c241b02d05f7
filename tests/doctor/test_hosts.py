"""Several nodes over SSH: a real sshd on the loopback, nodes that are dead, hung or hostile, and
what differs between them.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.processes import free_port
from dshealthd.cli import main as cli
from dshealthd.doctor.report import NodeReport
from dshealthd.doctor.several_nodes import compare
from dshealthd.doctor.ssh import (
    Answer,
    HostsError,
    _answer,
    _report,
    examine_nodes,
    host_names,
    query,
    remedy,
    run,
)
from dshealthd.linux.forked import Ended, Pool
from tests.command_line import shell_script
from tests.doctor.job.sshd import sshd

GOOD, DEAD, HUNG = "127.0.0.1", "127.0.0.13", "127.0.0.14"
ROOT = Path(cli.__file__).parents[2]


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an SSH client for which GOOD is this machine, DEAD refuses and HUNG never speaks."""
    base, port = tmp_path_factory.mktemp("ssh"), free_port()
    with sshd(base, port) as client, socket.create_server((HUNG, port)):
        shell_script(base / "dshealthd", f'cd {ROOT} && exec {sys.executable} -m dshealthd "$@"')
        yield client


class LastOneHangs(Pool):
    """Processes whose deadline passes once only one of them has not ended."""

    most = 0
    """How many ran at a time."""

    def ended(self, on_tick: Callable[[], object] = lambda: None) -> Iterator[Ended]:
        """Yield each as it ends."""

        def tick() -> None:
            on_tick()
            LastOneHangs.most = max(LastOneHangs.most, len(self._running))
            if len(self._running) == 1 and not self._running[0].is_killed:
                self._running[0].due = 0.0

        return super().ended(tick)


def test_dead_and_hung_nodes_cost_one_deadline(
    ssh: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three nodes one answers, one refuses, one hangs: each says so, side by side."""
    only = ("--only", "host-name", "--ssh", str(ssh))
    command = ("doctor", "--json", *only, "--remote-command", str(ssh.parent / "dshealthd"))
    assert cli.main([*command, "--hosts", GOOD, "--host-timeout", "100"]) == 3
    capsys.readouterr()
    monkeypatch.setattr("dshealthd.doctor.ssh.Pool", LastOneHangs)
    status = cli.main([*command, "--hosts", f"{GOOD},{DEAD},{HUNG}", "--host-timeout", "100"])
    assert (status, LastOneHangs.most) == (2, 3)
    document = json.loads(capsys.readouterr().out)
    nodes = {node["node"]: node for node in document["nodes"]}
    assert nodes[GOOD]["problem"] is None
    assert [one["check"] for one in nodes[GOOD]["checks"]] == ["host-name"]
    assert "Connection refused" in nodes[DEAD]["problem"]
    assert "no answer over SSH within 100 s" in nodes[HUNG]["problem"]
    (across,) = document["across"]
    assert across["outcome"] == "unknown"
    assert "1 of 3 nodes answered" in across["results"][0]["text"]


def test_a_job_is_checked_here_and_its_nodes_there(
    ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--only`, the nodes are asked for their own checks alone; without such, not at all."""
    job = ("doctor", "--json", "--job")
    launch = ("--", "torchrun", "--nproc-per-node=1", "train.py")
    remote = ("--ssh", str(ssh), "--remote-command", str(ssh.parent / "dshealthd"))
    hosts = ("--hosts", GOOD, "--host-timeout", "100")
    cli.main([*job, *hosts, *remote, "--only", "launcher,host-name", *launch])
    document = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in document["nodes"][0]["checks"]] == ["host-name"]
    assert [one["check"] for one in document["across"]] == ["same-on-all-nodes", "launcher"]
    assert cli.main([*job, "--hosts", DEAD, "--only", "launcher", *launch]) == 0
    (here,) = json.loads(capsys.readouterr().out)["nodes"]
    assert [one["check"] for one in here["checks"]] == ["launcher"]


def test_what_a_node_sends_is_not_trusted(ssh: Path) -> None:
    """A node that sends something else is unknown with the reason, and harms nothing."""
    for remote, word in (
        ("nobody-has-this", "--remote-command"),
        ("printf '{\\33[2J'", "sent an unreadable report"),
        ('echo {"schema":9}', "sent an unreadable report"),
        ("yes", "sent an unreadable report"),
    ):
        (found,) = examine_nodes([GOOD], [str(ssh)], ["sh", "-c", remote], 60.0, lambda *_: None)
        assert found.outcome.value == "unknown", remote
        assert word in found.problem
        assert found.problem.isprintable()


def test_what_a_node_sends_is_bounded() -> None:
    """A mebibyte, after which it is ended; of its errors, too, which keep no output waiting."""
    code, output, _ = run(lambda *_: None, ["yes"])
    assert (code, len(output)) == (-signal.SIGKILL, (1 << 20) + 1)
    chatty = ["sh", "-c", "head -c 100000 /dev/zero >&2; echo well"]
    code, output, errors = run(lambda *_: None, chatty)
    assert (code, output, len(errors)) == (0, "well\n", 100_000)


@pytest.mark.parametrize(("code", "output", "problem"), [
    (255, "", "not reachable over SSH: refused"),
    (255, "{", "sent an unreadable report (exit status 255): JSONDecodeError"),
    (127, "", "dshealthd is not in the PATH there (--remote-command): refused"),
    (1, "", "sent an unreadable report (exit status 1): refused"),
])  # fmt: skip
def test_how_ssh_ended(code: int, output: str, problem: str) -> None:
    """A node that could not be reached is told from one whose answer is none."""
    found = _report(Ended("n1", 1.0, value=(code, output, "x\nrefused\n")), 60.0)
    assert found.problem.startswith(problem)


@pytest.mark.parametrize(("problem", "command"), [
    ("Host key verification failed.", "ssh-keyscan -H n1 >> ~/.ssh/known_hosts"),
    ("No RSA host key is known for n1", "ssh-keyscan -H n1 >> ~/.ssh/known_hosts"),
    ("root@n1: Permission denied (publickey).", "ssh-copy-id n1"),
    ("ssh: Could not resolve hostname n1: Name not known", "getent hosts n1"),
    ("Connection refused", "ssh -v -o BatchMode=yes -o ConnectTimeout=5 n1 true"),
])  # fmt: skip
def test_what_to_do_about_an_unreachable_node(problem: str, command: str) -> None:
    """By what ssh says."""
    assert remedy("n1", problem) == command


@pytest.mark.parametrize(("code", "output", "errors", "answer"), [
    (0, "welcome\n--gpus--\n0000:1b:00.0\n0000:1c:00.0\n", "", Answer(gpus=2)),
    (0, "--gpus--\n", "a warning\n", Answer()),  # no driver is loaded
    (255, "", "a warning\nConnection refused\n", Answer("Connection refused")),
    (3, "welcome\n", " \n", Answer("ssh ended with status 3")),
])  # fmt: skip
def test_gpus_of_a_host(code: int, output: str, errors: str, answer: Answer) -> None:
    """Whatever a login shell prints, and why there is no answer."""
    assert _answer(code, output, errors) == answer


def test_a_connection_may_take_three_requests(tmp_path: Path) -> None:
    """TCP sends them at 0, 1 and 3 s; for the next, at 7 s, a host is not waited for."""
    program = shell_script(
        tmp_path / "ssh", 'echo "$@" | grep -o "ConnectTimeout=[0-9]*" >&2\nexit 255'
    )
    (answer,) = query(["n1"], str(program)).values()
    assert 3 < int(answer.problem.rpartition("=")[2]) < 7


def test_names_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists as Slurm writes them, hostfiles and the allocation; no option of SSH gets in."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node-2 slots=8\n# old\nnode-1 slots=8\n")
    assert host_names("node[08-10],login1") == ("node08", "node09", "node10", "login1")
    assert set(host_names(f"@{hostfile}")) == {"node-1", "node-2"}
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    assert host_names("slurm") == ("gpu1", "gpu2")
    hostfile.write_text("-oProxyCommand=reboot slots=8\n")
    for bad in ("-oProxyCommand=reboot", "a b;c", "node$(reboot)", f"@{hostfile}", "@/absent"):
        with pytest.raises(HostsError):
            host_names(bad)


def test_what_most_nodes_have_is_expected() -> None:
    """A node that differs from most is named with both values; what is not known is unknown."""
    usual = {"driver": "570.1", "kernel": "6.1", "mtu": "9000"}
    reports = [
        *(NodeReport(f"node-{number}", facts=usual) for number in range(3)),
        NodeReport("node-3", facts={**usual, "driver": "535.2"}),
        NodeReport("node-4", facts={"driver": "570.1", "kernel": "6.1"}),
        NodeReport("node-5", problem="no answer"),
    ]
    (found,) = compare(reports)
    assert found.slug == "node-drift"
    assert [(one.outcome.value, one.component) for one in found.results] == [
        ("warning", "driver"),
        ("unknown", "mtu"),
    ]
    assert "node-3: driver is 535.2, but 570.1 on 4 others" in found.results[0].text
    (tie,) = compare([NodeReport("a", facts={"x": "1"}), NodeReport("b", facts={"x": "2"})])
    assert "the nodes disagree on x: 1 on a; 2 on b" in tie.results[0].text
    for others, more in ((5, "n4: driver"), (6, "n4 and 1 more: driver")):
        odd = [NodeReport(f"n{number}", facts={"driver": "5"}) for number in range(others)]
        most = [NodeReport(f"m{number}", facts={"driver": "6"}) for number in range(others + 1)]
        (named,) = compare([*odd, *most])
        assert f"n0, n1, n2, n3, {more} is 5" in named.results[0].text
    (several,) = compare([NodeReport(f"n{n}", facts={"x": x}) for n, x in enumerate("33321")])
    assert [one.value for one in several.results] == ["1", "2"]
    (same,) = compare([NodeReport("a", facts=usual), NodeReport("b", facts=usual)])
    assert same.outcome.value == "ok"
