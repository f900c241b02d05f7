"""Several nodes over SSH: a real sshd on the loopback, nodes that are dead, hung or hostile, and what
differs between them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.processes import free_port
from dshealthd.cli import main as cli
from dshealthd.doctor.hosts import HostsError, ask, names
from dshealthd.doctor.report import NodeReport
from dshealthd.doctor.several_nodes import compare

if TYPE_CHECKING:
    from collections.abc import Iterator

SSHD = "/usr/sbin/sshd"
ROOT = Path(cli.__file__).parents[2]


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a client for which `good` is this machine, `dead` refuses and `hung` is silent."""
    if not Path(SSHD).exists() or os.geteuid() != 0:
        pytest.skip("needs sshd, as root")
    base = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(base / name)],
            check=True,
            timeout=60,
        )
    shutil.copy(base / "user.pub", base / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as hung, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # so that nobody else listens there
        port = free_port()
        (base / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {base}/host\nPidFile none\n"
            f"AuthorizedKeysFile {base}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin yes\n"
        )
        ports = {"good good2": port, "dead": closed.getsockname()[1], "hung": hung.getsockname()[1]}
        (base / "config").write_text(
            "".join(f"Host {name}\n Port {port}\n" for name, port in ports.items())
            + f"Host *\n HostName 127.0.0.1\n IdentityFile {base}/user\n IdentitiesOnly yes\n"
            f" StrictHostKeyChecking no\n UserKnownHostsFile {base}/known\n LogLevel ERROR\n"
        )
        client = base / "client"
        client.write_text(f'#!/bin/sh\nexec ssh -F {base}/config "$@"\n')
        client.chmod(0o755)
        program = base / "dshealthd"
        program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m dshealthd "$@"\n')
        program.chmod(0o755)
        with subprocess.Popen([SSHD, "-D", "-e", "-f", str(base / "sshd_config")]) as server:
            wait_for(port)
            yield client
            server.terminate()


def wait_for(port: int) -> None:
    """Wait until somebody listens."""
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
        else:
            return


def test_dead_and_hung_nodes_cost_one_deadline(
    ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three nodes one answers, one refuses, one hangs: each says so, side by side."""
    only = ("--only", "kernel-settings", "--ssh", str(ssh))
    command = ("doctor", "--json", *only, "--remote-command", str(ssh.parent / "dshealthd"))
    started = time.monotonic()
    assert cli.main([*command, "--hosts", "good", "--host-timeout", "100"]) == 3
    capsys.readouterr()
    deadline = max(8, math.ceil(5 * (time.monotonic() - started)))  # a good node has time
    started = time.monotonic()
    status = cli.main(
        [*command, "--hosts", "good,dead,hung", "--host-timeout", str(deadline)],
    )
    assert time.monotonic() - started < 2.5 * deadline
    assert status == 2
    document = json.loads(capsys.readouterr().out)
    nodes = {node["node"]: node for node in document["nodes"]}
    assert nodes["good"]["problem"] is None
    assert [one["check"] for one in nodes["good"]["checks"]] == ["kernel-settings"]
    assert "Connection refused" in nodes["dead"]["problem"]
    assert f"no answer over SSH within {deadline} s" in nodes["hung"]["problem"]
    (across,) = document["across"]
    assert across["outcome"] == "unknown"
    assert "1 of 3 nodes answered" in across["results"][0]["text"]


def test_what_a_node_sends_is_not_trusted(ssh: Path) -> None:
    """A node that sends something else is unknown with the reason, and harms nothing."""
    for remote, word in (
        ("nobody-has-this", "--remote-command"),
        ("printf '{\\33[2J'", "sent an unreadable report"),
        ('echo {"schema":9}', "sent an unreadable report"),
        ("yes", "sent an unreadable report"),
    ):
        (found,) = ask(["good"], [str(ssh)], ["sh", "-c", remote], 60.0, lambda *_: None)
        assert found.outcome.value == "unknown", remote
        assert word in found.problem
        assert found.problem.isprintable()


def test_names_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists as Slurm writes them, hostfiles and the allocation; no option of SSH gets in."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node-2 slots=8\n# old\nnode-1 slots=8\n")
    assert names("node[08-10],login1") == ("node08", "node09", "node10", "login1")
    assert set(names(f"@{hostfile}")) == {"node-1", "node-2"}
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    assert names("slurm") == ("gpu1", "gpu2")
    hostfile.write_text("-oProxyCommand=reboot slots=8\n")
    for bad in ("-oProxyCommand=reboot", "a b;c", "node$(reboot)", f"@{hostfile}", "@/absent"):
        with pytest.raises(HostsError):
            names(bad)


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
    (same,) = compare([NodeReport("a", facts=usual), NodeReport("b", facts=usual)])
    assert same.outcome.value == "ok"
