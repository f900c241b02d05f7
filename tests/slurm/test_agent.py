"""The findings of the agent are taken from the agent alone, and never waited for."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd import config
from dshealthd.slurm import agent
from dshealthd.slurm.agent import AgentSilent, Finding
from dshealthd.slurm.options import DRAIN_FOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.config import Config
    from dshealthd.slurm.agent import Verdict

_SERVER = """
import os, socket, sys, time
os.setuid(65534)  # here, as this user may not be able to start the interpreter
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(sys.argv[1].encode())
    time.sleep(3600)
"""


def document(**other: Any) -> dict[str, Any]:
    """Return a status document with one lost GPU."""
    return {
        "time": 1000.0,
        "schema": 1,
        "verdict": "critical",
        "findings": [
            {
                "slug": "gpu-lost",
                "alert": "DshealthdGpuLost",
                "severity": "critical",
                "component": "gpu",
                "part": "GPU 3",
            }
        ],
        "metrics": {
            "dshealthd_xid_last_timestamp_seconds": {
                "samples": [
                    {"labels": {"gpu": "3", "xid": "79"}, "value": 990.0},
                    {"labels": {"gpu": "3", "xid": "13"}, "value": 900.0},
                    {"labels": {"gpu": "1", "xid": "48"}, "value": 995.0},
                ]
            }
        },
        **other,
    }


def answer(body: str, status: str = "200 OK") -> str:
    """Return an answer of HTTP."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def configured(port: int) -> Config:
    """Return a configuration with the agent on a port."""
    loaded = config.load(None)
    return replace(loaded, web=replace(loaded.web, listen_address=f"127.0.0.1:{port}"))


def ask(port: int) -> Verdict:
    """Ask the agent of a port."""
    return agent.ask(configured(port), DRAIN_FOR)


@contextlib.contextmanager
def serving(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """Answer connections in a thread of this process; yield the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                talk(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(20)


@contextlib.contextmanager
def stranger(text: str) -> Iterator[int]:
    """Answer as another user; yield the port."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SERVER, text],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def held(text: str) -> Callable[[socket.socket], object]:
    """Send a text and keep the connection until the other end closes it."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(text.encode())
        connection.settimeout(20)
        connection.recv(1)

    return talk


def test_finding_and_its_xid() -> None:
    """A critical finding is named as the reason has it, with the last Xid of its GPU."""
    with serving(held(answer(json.dumps(document())))) as port:
        verdict = ask(port)
    assert verdict.findings == (Finding("gpu-lost", "DshealthdGpuLost", "gpu=3", "79"),)
    assert verdict.findings[0].reason == "gpu-lost gpu=3 xid=79"
    assert not verdict.clean


@pytest.mark.parametrize(
    ("change", "found", "clean"),
    [
        ({"findings": [], "verdict": "ok"}, 0, True),
        ({"findings": [], "verdict": "warning"}, 0, True),
        ({"findings": [], "verdict": "unknown"}, 0, False),
        ({"findings": [], "verdict": "critical"}, 0, False),
        ({"time": 9999.0}, 1, False),
    ],
)
def test_verdicts(change: dict[str, Any], found: int, clean: bool) -> None:  # noqa: FBT001 - a case
    """Unknown is not clean, and neither is critical for what does not drain."""
    verdict = agent.parse(document(**change), frozenset(DRAIN_FOR))
    assert (len(verdict.findings), verdict.clean) == (found, clean)


def test_only_critical_ones_that_were_asked_for() -> None:
    """A warning, another alert, an unknown source and an agent without rights drain nothing."""
    finding = document()["findings"][0]
    others = [
        {**finding, "severity": "warning"},
        {**finding, "severity": "unknown"},
        {**finding, "alert": "DshealthdFilesystemFull"},
        {**finding, "reason": "permission_denied"},
    ]
    assert not agent.parse(document(findings=others), frozenset(DRAIN_FOR)).findings


def test_reason_is_made_of_harmless_characters() -> None:
    """What a part or a slug holds cannot leave the reason, nor become a field of scontrol."""
    finding = document()["findings"][0] | {
        "slug": "gpu-lost]\nState=DOWN",
        "component": "path",
        "part": "/x\n[dshealthd: y]|a=b" + "z" * 100,
    }
    reason = agent.parse(document(findings=[finding]), frozenset(DRAIN_FOR)).findings[0].reason
    assert not set(reason) & set("\n[]|;'\"$`")
    assert len(reason) < 120


@pytest.mark.parametrize("body", ["", "[]", "{}", "nonsense", '{"schema": 2}', '{"schema": 1}'])
def test_nonsense(body: str) -> None:
    """An answer that is not understood says nothing of the node."""
    with serving(held(answer(body))) as port, pytest.raises(AgentSilent, match="understood"):
        ask(port)


def test_refusal() -> None:
    """An agent that asks for a password says nothing of the node."""
    with (
        serving(held(answer("", "401 Unauthorized"))) as port,
        pytest.raises(AgentSilent, match="401"),
    ):
        ask(port)


def test_absent() -> None:
    """No agent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(AgentSilent, match="refused"):
        ask(port)


def _hang(connection: socket.socket) -> None:
    connection.settimeout(20)
    connection.recv(1)


def _trickle(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(200):
        connection.sendall(b" ")
        time.sleep(0.1)


@pytest.mark.parametrize("talk", [_hang, _trickle])
def test_hung_agent(talk: Callable[[socket.socket], object]) -> None:
    """One that accepts and says nothing, or a byte at a time, is waited for 1.5 s and no longer."""
    started = time.monotonic()
    with serving(talk) as port:
        with pytest.raises(AgentSilent, match=r"within 1.5 s"):
            ask(port)
        assert time.monotonic() - started < agent.TIMEOUT + 2  # on a loaded machine


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be another user")
def test_another_user_on_the_port() -> None:
    """Findings of a user who listens where no agent runs are not believed."""
    with (
        stranger(answer(json.dumps(document()))) as port,
        pytest.raises(AgentSilent, match="not believed"),
    ):
        ask(port)
