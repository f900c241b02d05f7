"""`dshealthd free-port`: a port that is free, stays free, and is handed on."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dshealthd.cli import free_port
from dshealthd.cli import main as cli
from dshealthd.cli.free_port import Held, NoPort, candidates, hold
from tests.linux.test_local_network import assigning
from tests.netns import connection, listener, network_namespace
from tests.waiting import until

COMMAND = [sys.executable, "-m", "dshealthd", "free-port"]


@pytest.fixture
def _namespace() -> Iterator[None]:
    """Ports of the test's own."""
    with network_namespace():
        yield


def test_ephemeral_ports_are_left_out_unless_reserved(tmp_path: Path) -> None:
    """A port that the kernel gives out is none, but for those that are reserved from it; the
    agent's own and NCCL RAS's are never given out.
    """
    host = assigning(tmp_path, "29510\t60999", "29515,29520-29521")
    assert sorted(candidates(host, 29508, 29521)) == [29508, 29509, 29515, 29520, 29521]
    assert candidates(host, 10061, 10061 + 2) == [10063]
    assert candidates(host, 28028, 28029) == [28029]
    with pytest.raises(NoPort, match=r"29530-29540.*ephemeral range 29510-60999.*sysctl"):
        candidates(host, 29530, 29540)


@pytest.mark.usefixtures("_namespace")
def test_listening_and_waiting_ports_are_not_free() -> None:
    """A listener of either family and a socket in TIME_WAIT take their port; held is held."""
    four, six, old = listener("127.0.0.1"), listener("::1"), listener("127.0.0.1")
    client, accepted = connection(old)
    accepted.close()
    client.close()
    old.close()  # nobody listens any more, and the accepted end is in TIME_WAIT
    busy = [one.getsockname()[1] for one in (four, six)] + [waiting_port()]
    spare = 29533
    held = hold([*busy, spare])
    assert held.port == spare
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", spare))
    with pytest.raises(NoPort, match="ss -tanp"):
        hold([*busy, spare])
    held.release()
    listener("127.0.0.1", spare).close()
    four.close()
    six.close()


def waiting_port() -> int:
    """Return the port of the only socket in TIME_WAIT here, once the kernel has it there."""
    command = ["ss", "-tanH", "state", "time-wait"]
    (line,) = until(lambda: subprocess.check_output(command, text=True, timeout=60).splitlines())
    return int(line.split()[2].rpartition(":")[2])


@pytest.mark.usefixtures("_namespace")
def test_command_gets_the_port() -> None:
    """The port is free again as COMMAND starts."""
    script = (
        "import os, socket; socket.socket().bind(('', int(os.environ['MASTER_PORT'])))\n"
        "print('bound')\n"
    )
    command = [*COMMAND, "--", sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True, timeout=60) == "bound\n"


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Is named, with a shell's exit status: 1 would be that no port is free."""
    assert cli.main(["free-port", "--", "no-such-program"]) == 127
    said = "dshealthd free-port: no-such-program: No such file or directory\n"
    assert capsys.readouterr().err == said


def test_bad_ranges_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A range that is none, and one that only the kernel uses, say what would be right."""
    for text, status, message in (
        ("1-x", 2, '"1-x" is not a range of ports'),
        ("40000-40001", 1, "ephemeral range"),
    ):
        assert cli.main(["free-port", "--range", text]) == status
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("refused", "number", "sockets"), [
    (socket.AF_INET6, errno.EAFNOSUPPORT, 1),
    (socket.AF_INET6, errno.EMFILE, None),
    (socket.AF_INET, errno.EAFNOSUPPORT, None),
])  # fmt: skip
def test_a_kernel_without_ipv6(
    refused: int, number: int, sockets: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody binds a port of a family that it does not have; any other failure is one."""

    def made(family: int, kind: int) -> socket.socket:
        if family == refused:
            raise OSError(number, os.strerror(number))
        return socket.socket(family, kind)

    monkeypatch.setattr(free_port, "socket", SimpleNamespace(**vars(socket) | {"socket": made}))
    with contextlib.nullcontext() if sockets else pytest.raises(OSError, match=os.strerror(number)):
        held = Held(0)
        assert len(held.sockets) == sockets
        held.release()
