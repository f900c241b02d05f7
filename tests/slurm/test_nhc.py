"""The check for NHC, in bash as NHC runs it, against who may listen on the agent's port."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECK = Path(__file__).parents[2] / "deploy/slurm/dshealthd.nhc"
SCRIPT = """
die() { echo "die $1 $2"; }
log() { echo "log $*"; }
. "$1"
check_dshealthd "$2"
echo "returned $?"
"""
AGENT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    request = b""
    while b"\\r\\n\\r\\n" not in request:
        request += client.recv(1000)
    text = sys.argv[1]
    status = "200 OK" if text == "fit" else "503 Service Unavailable"
    if text != "silent":
        client.sendall(f"HTTP/1.0 {status}\\r\\nServer: x\\r\\n\\r\\n{text}\\n".encode())
        client.close()
"""


@contextlib.contextmanager
def listening(text: str, user: int = 0) -> Iterator[str]:
    """Answer with this text as this user; yield the port."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", AGENT, text, str(user)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def check(port: str) -> list[str]:
    """Return what NHC would be told, line by line."""
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "nhc", str(CHECK), port],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    return done.stdout.splitlines()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the agent is root's")


@needs_root
def test_a_fit_node_passes() -> None:
    """The agent says fit: nothing is said."""
    with listening("fit") as port:
        assert check(port) == ["returned 0"]


@needs_root
def test_an_unfit_node_fails_with_its_finding() -> None:
    """The agent's reason is the note that NHC writes on the node."""
    with listening("unfit: gpu_lost (GPU 3)") as port:
        assert check(port) == [
            "die 1 check_dshealthd:  dshealthd: gpu_lost (GPU 3)",
            "returned 1",
        ]


@needs_root
def test_unknown_fails_nothing() -> None:
    """No agent, one that hangs, and one that does not know: logged, and the node stays."""
    with listening("unknown: no sample yet") as port:
        said = check(port)
    assert said == [
        "log check_dshealthd:  dshealthd is unknown: unknown: no sample yet",
        "returned 0",
    ]
    missing = [
        f"log check_dshealthd:  dshealthd is unknown: the agent on port {port} does not answer",
        "returned 0",
    ]
    assert check(port) == missing
    with listening("silent") as port:
        assert check(port)[-1] == "returned 0"


@needs_root
def test_a_users_process_is_not_believed() -> None:
    """Whoever took the port of an agent that is down can neither drain the node nor call it fit."""
    for text in ("unfit: everything", "fit"):
        with listening(text, user=65534) as port:
            said = check(port)
        assert said == [
            f"log check_dshealthd:  dshealthd is unknown: port {port} belongs to user 65534",
            "returned 0",
        ]
