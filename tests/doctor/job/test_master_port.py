"""The port where ranks meet: real listeners and connections, and the port that the remedy
prints.
"""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import free_port
from dshealthd.core.host import Host, read
from dshealthd.doctor.check import Result
from dshealthd.doctor.job.context import JobContext
from dshealthd.findings.finding import State
from tests.doctor.job.asking import (
    CRITICAL,
    OK,
    WARNING,
    asked,
    asked_of_script,
    outcomes,
    results,
    texts,
)


def port_job(port: int | str) -> JobContext:
    """Return a job of one node that meets on this port."""
    return asked(launch=f"torchrun --master-addr=127.0.0.1 --master-port={port} x.py")


def test_master_port() -> None:
    """A port with a listener is critical; free again once that has gone."""
    port = free_port()
    with socket.socket() as orphan:
        orphan.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        orphan.bind(("127.0.0.1", port))
        orphan.listen()
        found = results("master-port", port_job(port))
        assert [one.outcome for one in found] == [CRITICAL]
        assert f"port {port} is taken" in found[0].text
        assert str(port) in found[0].remedy
    assert outcomes("master-port", port_job(port)) == [OK]


def test_master_port_in_time_wait() -> None:
    """Connections of an earlier run in TIME_WAIT on the port are a warning."""
    port = free_port()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port)) as other:
            server.accept()[0].close()  # who closes first has the socket in TIME_WAIT
            assert other.recv(1) == b""
    found = results("master-port", port_job(port))
    assert "in TIME_WAIT" in texts(found)
    assert {one.outcome for one in found} == {WARNING}
    for one in found:
        assert mended_port(one) == [OK]


def mended_port(result: Result) -> list[State]:
    """Return what is said of the port that the remedy prints."""
    program, *arguments = result.remedy.split()
    assert program == "dshealthd"
    printed = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    return [one.outcome for one in results("master-port", port_job(int(printed)))]


@pytest.mark.parametrize(
    ("port", "outcome", "words"),
    [
        ("0", CRITICAL, "is not a port"),
        ("65536", CRITICAL, "is not a port"),
        ("abc", CRITICAL, "is not a port"),
        ("80", WARNING, "privileged"),
    ],
)
def test_ports_that_are_none(port: str, outcome: State, words: str) -> None:
    """A number that no listener can have is found."""
    (result,) = (one for one in results("master-port", port_job(port)) if words in one.text)
    assert result.outcome is outcome
    assert mended_port(result) == [OK]


@pytest.mark.parametrize(("port", "says"), [(1023, True), (1024, False), (65_535, False)])
def test_privileged_ports(port: int, *, says: bool) -> None:
    """Only root may open a port below 1024."""
    said = texts(results("master-port", port_job(port)))
    assert ("is privileged" in said, "is not a port" in said) == (says, False)


@pytest.mark.parametrize(
    ("launch", "port"),
    [
        ("deepspeed --master_addr=a x.py", 29500),
        ("torchrun --nnodes=2 --master-addr=a x.py", 29500),
        ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a x.py", 29400),
        ("srun torchrun $ARGS --master-addr=a x.py", None),
    ],
)
def test_port_of_a_launcher(launch: str, port: int | None) -> None:
    """Where none is given, each rendezvous has its own."""
    assert asked(launch=launch).rendezvous.port == port


def test_reserved_port(tmp_path: Path) -> None:
    """A port that the administrator reserved is not one that a connection may take."""
    settings = tmp_path / "sys/net/ipv4"
    settings.mkdir(parents=True)
    (settings / "ip_local_port_range").write_text("20000\t60999\n")
    for reserved, expected in (("8080,29500-29501\n", [OK]), ("\n", [WARNING])):
        (settings / "ip_local_reserved_ports").write_text(reserved)
        job = dataclasses.replace(port_job(29500), host=Host(procfs=tmp_path))
        (tmp_path / "net").mkdir(exist_ok=True)
        (tmp_path / "net/tcp").write_text("  sl  local_address rem_address\n")
        assert outcomes("master-port", job) == expected
    (settings / "ip_local_reserved_ports").unlink()
    assert "is unknown" in texts(results("master-port", job))


def test_ephemeral_port() -> None:
    """A port that the kernel gives to connections may be gone when the job starts."""
    first = int(read("/proc/sys/net/ipv4/ip_local_port_range").split()[0])
    found = results("master-port", port_job(first))
    (result,) = (one for one in found if "is in the ephemeral range" in one.text)
    assert mended_port(result) == [OK]


@pytest.mark.parametrize(
    ("head", "options", "says"),
    [
        ("--gres=gpu:3 --array=1-4", "", 1),
        ("--gres=gpu:4 --array=1-4", "", 0),
        ("--gres=gpu:1 --array=1-4%1", "", 0),
        ("--gres=gpu:1 --array=1-4 --exclusive", "", 0),
        ("--gres=gpu:1 --array=1-4", "--standalone", 0),
        ("--gres=gpu:1", "", 0),
    ],
)
def test_port_of_an_array(tmp_path: Path, head: str, options: str, says: int) -> None:
    """Tasks of an array that may share a node need a port each."""
    text = f"#SBATCH -N 1 {head}\ntorchrun --nproc-per-node=1 {options} x.py"
    job = asked_of_script(tmp_path, text)
    found = [one for one in results("master-port", job) if "array" in one.text]
    assert [one.outcome for one in found] == [WARNING] * says
