"""The check for NHC, in bash as NHC runs it, against who may listen on the agent's port."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.http.impostors import NOBODY, answering_as, nobody, serving

CHECK = Path(__file__).parents[2] / "deploy/slurm/dshealthd.nhc"
SCRIPT = """
die() { echo "die $1 $2"; }
log() { echo "log $*"; }
. "$1"
check_dshealthd "$2"
echo "returned $?"
"""


def said(directory: Path, text: str, user: int = 0) -> list[str]:
    """Return what NHC would be told where an agent of a user answers with this text."""
    status = "200 OK" if text == "fit" else "503 Service Unavailable"
    with answering_as(directory, f"HTTP/1.0 {status}\r\nServer: x\r\n\r\n{text}\n", user) as agent:
        return check(agent.port)


def check(port: int) -> list[str]:
    """Return what NHC would be told, line by line."""
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "nhc", str(CHECK), str(port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    return done.stdout.splitlines()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the agent is root's")


@needs_root
def test_a_node_fails_only_if_it_is_unfit(tmp_path: Path) -> None:
    """The agent's reason is the note that NHC writes on the node; what is unknown is logged."""
    assert said(tmp_path, "fit") == ["returned 0"]
    assert said(tmp_path, "unfit: gpu_lost (GPU 3)") == [
        "die 1 check_dshealthd:  dshealthd: gpu_lost (GPU 3)",
        "returned 1",
    ]
    assert said(tmp_path, "unknown: no sample yet") == [
        "log check_dshealthd:  dshealthd is unknown: unknown: no sample yet",
        "returned 0",
    ]


@needs_root
def test_an_agent_that_is_absent_or_hangs_fails_nothing() -> None:
    """Without an answer the node stays, within NHC's time."""
    with nobody() as port:
        assert check(port) == [
            f"log check_dshealthd:  dshealthd is unknown: the agent on port {port} does not answer",
            "returned 0",
        ]
    with serving(lambda connection, _: connection.recv(1)) as port:
        assert check(port)[-1] == "returned 0"


@needs_root
@pytest.mark.parametrize("text", ["unfit: everything", "fit"])
def test_a_users_process_is_not_believed(tmp_path: Path, text: str) -> None:
    """Whoever took the port of an agent that is down can neither drain the node nor call it fit."""
    logged, end = said(tmp_path, text, user=NOBODY)
    assert logged.endswith(f" belongs to user {NOBODY}")
    assert end == "returned 0"
