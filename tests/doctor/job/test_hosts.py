"""Hostfiles, names and SSH: real files, the real resolver, and a real sshd on the loopback."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dshealthd.doctor.check import Result
from dshealthd.doctor.job.checks import applicable
from dshealthd.doctor.job.context import JobContext
from dshealthd.findings.finding import State
from tests.doctor.job.asking import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARNING,
    asked,
    outcomes,
    results,
    runs_as_nobody,
    texts,
)
from tests.doctor.job.sshd import WITHOUT_KEY, sshd
from tests.doctor.looks import apply
from tests.netns import network_namespace


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return an ssh that reaches the test's own sshd."""
    with sshd(tmp_path_factory.mktemp("sshd")) as program:
        yield str(program)


def job(
    tmp_path: Path, hostfile: str, *arguments: str, ssh: str = "ssh", **more: Any
) -> JobContext:
    """Return a job with this hostfile."""
    file = tmp_path / "hostfile"
    file.write_text(hostfile)
    return dataclasses.replace(asked("--hostfile", str(file), *arguments, **more), ssh=ssh)


@pytest.mark.parametrize(
    ("text", "mended", "outcome", "words"),
    [
        ("127.0.0.1 slots=8\n127.0.0.2 slots=8\n", "", OK, "well-formed"),
        ("# head\n\n127.0.0.1 slots=8 # tail\n", "", OK, "well-formed"),
        ("127.0.0.1 slots=8\r\n127.0.0.2\tslots=4\r\n", "", OK, "well-formed"),
        ("a slots=8\na slots=8\n", "a slots=8\n", CRITICAL, ':2: "a" is a duplicate of line 1'),
        ("a slot=8\n", "a slots=8\n", CRITICAL, ':1: "a slot=8" is not "NAME slots=COUNT"'),
        ("a\n", "a slots=8\n", CRITICAL, 'is not "NAME slots=COUNT"'),
        ("a slots=-8\n", "a slots=8\n", CRITICAL, 'is not "NAME slots=COUNT"'),
        ("a slots = 8\n", "a slots=8\n", CRITICAL, 'is not "NAME slots=COUNT"'),
        ("", "a slots=8\n", CRITICAL, "names no host"),
        ("a slots=0\nb slots=8\n", "", OK, "well-formed"),
    ],
)
def test_lines(tmp_path: Path, text: str, mended: str, outcome: State, words: str) -> None:
    """What DeepSpeed's runner refuses is found, with the line; what it takes is not."""
    (result,) = results("hostfile", job(tmp_path, text))
    assert result.outcome is outcome
    assert words in result.text
    if outcome is not OK:
        shown = apply(result)
        assert not text or any(line in shown for line in text.splitlines())
        assert outcomes("hostfile", job(tmp_path, mended)) == [OK]


def test_missing_hostfile(tmp_path: Path) -> None:
    """DeepSpeed goes on with one node where the hostfile is missing: critical until it is there."""
    file = tmp_path / "hostfile"
    (result,) = results("hostfile", asked("--hostfile", str(file)))
    assert result.outcome is CRITICAL
    assert str(file) in result.text
    file.write_text("a slots=8\n")
    assert outcomes("hostfile", asked("--hostfile", str(file))) == [OK]


def test_filter_that_names_no_host(tmp_path: Path) -> None:
    """`--include` of a host that the hostfile lacks, which deepspeed refuses: unknown ranks."""
    for host, ranks in (("a", 1), ("b", None)):
        made = job(tmp_path, "a slots=8\n", launch=f"deepspeed --include={host}:0 x.py")
        assert made.layout.ranks == ranks


def test_ranks_of_hosts_that_ssh_compares(tmp_path: Path) -> None:
    """Where this node's GPUs are not known, the check `ssh` counts those of the hosts."""
    assert outcomes("ranks-and-gpus", job(tmp_path, "127.0.0.1 slots=8\n")) == [OK]


def test_hostfile_of_the_command(tmp_path: Path) -> None:
    """The hostfile that the launcher is given is read without being named again."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 slots=4\n")
    made = asked(launch=f"deepspeed -H {file} --master_addr 127.0.0.1 x.py")
    assert made.layout.ranks == 4


def test_names(tmp_path: Path) -> None:
    """Names that resolve are ok; one that does not is named, and so are two of one host."""
    good = "127.0.0.1 slots=8\n127.0.0.2 slots=8\n"
    assert outcomes("hostfile-names", job(tmp_path, good)) == [OK]
    found = results("hostfile-names", job(tmp_path, f"{good}no-such-host.invalid slots=8\n"))
    assert "no-such-host.invalid does not resolve" in texts(found)
    # without a name server nobody knows whether the name is wrong
    assert {one.outcome for one in found} <= {CRITICAL, UNKNOWN}
    (result,) = results("hostfile-names", job(tmp_path, "127.0.0.1 slots=8\nlocalhost slots=8\n"))
    assert result.outcome is CRITICAL
    assert "localhost and 127.0.0.1 are the same host" in result.text
    apply(result)  # shows that both have one address


def test_ssh_refused(tmp_path: Path, client: str) -> None:
    """Of several hosts those that refuse are named, with a way to look."""
    made = job(tmp_path, "127.0.0.1 slots=8\n127.0.0.13 slots=8\n", ssh=client)
    (result,) = results("ssh", made)
    assert result.outcome is CRITICAL
    assert "127.0.0.13 is not reachable over SSH" in result.text
    assert "Connection refused" in result.text
    assert result.remedy.startswith("ssh -v")


def test_key_that_is_missing(tmp_path: Path) -> None:
    """A host without this user's key passes once the key is where the remedy puts it."""
    directory = tmp_path / "sshd"
    directory.mkdir()
    with sshd(directory) as program:
        made = job(tmp_path, f"{WITHOUT_KEY} slots=8\n", ssh=str(program))
        (refused,) = results("ssh", made)
        assert "Permission denied" in refused.text
        assert refused.remedy == f"ssh-copy-id {WITHOUT_KEY}"
        with (directory / "authorized").open("a") as authorized:  # what ssh-copy-id does there
            authorized.write((directory / "other.pub").read_text())
        assert outcomes("ssh", made) == [OK]


def test_new_host_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose own key is new passes once the remedy is pasted."""
    directory = tmp_path / "sshd"
    (directory / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(directory))
    with network_namespace(), sshd(directory, 22) as program:
        known = directory / "known_hosts"
        known.write_text("")
        (directory / ".ssh/known_hosts").symlink_to(known)
        made = job(tmp_path, "127.0.0.1 slots=8\n", ssh=str(program))
        (strange,) = results("ssh", made)
        assert "Host key verification failed" in strange.text
        apply(strange)
        assert outcomes("ssh", made) == [OK]


def test_ssh_without_answer(tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that accepts the connection and says nothing is given up at the deadline."""
    monkeypatch.setattr("dshealthd.doctor.ssh.DEADLINE", 2.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        command = f"deepspeed --ssh_port {port} x.py"
        made = job(tmp_path, "127.0.0.1 slots=8\n", launch=command, ssh=client)
        (result,) = results("ssh", made)
    assert result.outcome is CRITICAL
    assert "no answer within 2 s" in result.text


def test_healthy_job(tmp_path: Path, client: str) -> None:
    """A job that would start has nothing wrong by any check that applies, and is ok by each."""
    config = tmp_path / "ds_config.json"
    config.write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},'
        ' "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}'
    )
    made = job(
        tmp_path,
        "127.0.0.1 slots=8\n",
        *("--deepspeed-config", str(config)),
        *("--gpus-per-node", "8"),
        *("--python", sys.executable),
        ssh=client,
        launch="deepspeed --master_addr=127.0.0.1 --master_port=29501 x.py",
        environment={"NCCL_DEBUG": "INFO"},
    )
    found = {check.name: results(check.name, made) for check in applicable(made)}
    closed = os.geteuid() == 0 and not runs_as_nobody(sys.executable)
    for name, several in found.items():
        if name == "master-port":  # which another program of this machine may have
            continue
        if closed and [result.outcome for result in several] == [UNKNOWN]:
            # An interpreter below /root: root runs it as nobody, to whom it is closed.
            assert "cannot be started as nobody" in texts(several)
            continue
        assert [result.outcome for result in several] == [OK], f"{name}: {texts(several)}"
    assert len(found) > 11


def test_variables_that_stay_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that deepspeed keeps on one node are named unless `.deepspeed_env` has them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    environment = {"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_DEBUG": "INFO"}
    hosts = "192.0.2.1 slots=8\n192.0.2.2 slots=8\n"

    def said(command: str) -> Result:
        made = job(tmp_path, hosts, launch=command, environment=environment)
        (result,) = results("launcher", made)
        return result

    words = "TORCH_NCCL_BLOCKING_WAIT: deepspeed does not pass this on to the other nodes"
    launch = "deepspeed --master_addr=192.0.2.1 x.py"
    assert said(launch).outcome is WARNING
    assert words in said(launch).text
    for command in ("deepspeed --no_ssh --node_rank=0 x.py", "deepspeed --num_nodes=1 x.py"):
        assert said(command).outcome is OK
    taken = tmp_path / ".deepspeed_env"
    wanted = "TORCH_NCCL_BLOCKING_WAIT=1\n"
    for text, outcome in (
        ("NCCL_DEBUG=INFO\n", WARNING),
        (wanted, OK),
        (wanted.ljust(1 << 20, "#"), OK),
        (wanted.ljust((1 << 20) + 1, "#"), WARNING),  # one that is too large is not read
    ):
        taken.write_text(text)
        assert said(launch).outcome is outcome


def test_without_ssh(tmp_path: Path) -> None:
    """Where there is no ssh nobody knows; a launcher that needs none is not asked about."""
    (result,) = results("ssh", job(tmp_path, "127.0.0.1 slots=8\n", ssh="/nowhere/ssh"))
    assert result.outcome is UNKNOWN
    made = job(tmp_path, "127.0.0.1 slots=8\n", launch="deepspeed --no_ssh x.py")
    assert not made.by_ssh


@pytest.mark.parametrize(
    ("command", "outcome", "words"),
    [
        ("torchrun --nnodes=2 --master-addr=127.0.0.1 x.py", CRITICAL,
         "each node's own loopback, but the job has 2 nodes"),
        ("torchrun --nnodes=2 x.py", CRITICAL, "--master-addr is missing"),
        ("torchrun --nnodes=2 --rdzv-backend=c10d x.py", CRITICAL,
         "--rdzv-endpoint is missing (only the static rendezvous reads --master-addr)"),
        ("torchrun --nnodes=2 --rdzv-endpoint=localhost:29500 x.py", CRITICAL, "loopback"),
        ("torchrun --nnodes=1 --master-addr=localhost x.py", OK, "Other nodes can reach"),
        ("torchrun --standalone --nproc-per-node=8 x.py", OK, "Other nodes can reach"),
        ("torchrun --nnodes=2 --rdzv-endpoint=192.0.2.1:29500 x.py", OK, "Other nodes can reach"),
        ("torchrun --nnodes=2 --master-addr=no-such.invalid x.py", None, "does not resolve"),
        ("deepspeed --master_addr=192.0.2.9 x.py", WARNING,
         "not the address of any node of the job"),
        ("deepspeed --master_addr=192.0.2.1 x.py", OK, "Other nodes can reach"),
    ],
)  # fmt: skip
def test_master_address(tmp_path: Path, command: str, outcome: State | None, words: str) -> None:
    """An address that others cannot reach is found before the first rank waits for it."""
    hostfile = "192.0.2.1 slots=8\n192.0.2.2 slots=8\n" if "deepspeed" in command else "a slots=1"
    (result,) = results("master-address", job(tmp_path, hostfile, launch=command))
    if outcome is not None:
        assert result.outcome is outcome, result.text
    else:  # without a name server it is unknown
        assert result.outcome in {CRITICAL, UNKNOWN}
    assert words in result.text
    if result.outcome is not OK:
        assert result.remedy
        mended = re.sub(r"(-addr|_addr)=\S+|(endpoint)=[^:]+", r"\1\2=192.0.2.1", command)
        if mended == command:  # no address was given
            option = "--rdzv-endpoint" if "c10d" in command else "--master-addr"
            mended = command.replace(" x.py", f" {option}=192.0.2.1 x.py")
        (result,) = results("master-address", job(tmp_path, hostfile, launch=mended))
        assert result.outcome is OK, result.text


def test_name_server_that_does_not_answer(tmp_path: Path) -> None:
    """Where no name server answers, nothing is known of the names: no verdict on any host."""
    hostfile = "".join(f"node{number}.invalid slots=8\n" for number in range(12))
    with network_namespace():
        made = job(tmp_path, hostfile, launch="deepspeed --master_addr=node0.invalid x.py")
        for name in ("hostfile-names", "master-address"):
            found = results(name, made)
            assert {one.outcome for one in found} == {UNKNOWN}, texts(found)
            more = ["4 more names do not resolve, of 12"] * (name == "hostfile-names")
            assert [one.text for one in found[8:]] == more


def test_master_port_of_another_node(tmp_path: Path) -> None:
    """Nothing is said of the port on a node other than this one: its sockets are not seen here."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for host, outcome in (("192.0.2.1", OK), ("127.0.0.1", CRITICAL)):
            hostfile = f"{host} slots=8\n"
            made = job(tmp_path, hostfile, launch=f"deepspeed --master_port={port} x.py")
            assert results("master-port", made)[0].outcome is outcome
