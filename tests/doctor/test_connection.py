"""Connections to other nodes: their outcomes are told apart."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from dshealthd.doctor.connection import ConnectionOutcome, connect
from tests.netns import listener, network_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "10.99.0.1"
"""An address of the namespace that is not the loopback's own."""


@pytest.fixture
def network() -> Iterator[None]:
    """A network with one address that can be connected to, and no other node."""
    with network_namespace():
        done = subprocess.run(
            ["ip", "address", "add", f"{HERE}/32", "dev", "lo"], check=False, capture_output=True
        )
        if done.returncode:
            pytest.skip(f"no address can be added: {done.stderr.decode()}")
        yield


def free_port() -> int:
    """Return a port that is free in the namespace."""
    with listener(HERE) as made:
        return int(made.getsockname()[1])


def test_outcomes(network: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Answered, refused, without a route, without a name and without an answer are told apart."""
    with listener(HERE) as made:
        assert connect(HERE, made.getsockname()[1], 2.0) is ConnectionOutcome.OK
    assert connect(HERE, free_port(), 2.0) is ConnectionOutcome.REFUSED
    assert connect("10.98.0.1", 29500, 2.0) is ConnectionOutcome.UNREACHABLE
    with listener(HERE, backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(3):  # who comes next is not answered: the queue is full
            client = waiting.enter_context(socket.socket())
            client.settimeout(0)
            client.connect_ex(full.getsockname())
        assert connect(HERE, full.getsockname()[1], 0.5) is ConnectionOutcome.TIMED_OUT

    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert connect("no-such-node", 29500, 1.0) is ConnectionOutcome.NAME_UNKNOWN


def test_name_server_that_does_not_answer(network: None) -> None:  # noqa: ARG001
    """Where no name server answers, as in this network, nothing is said of the node."""
    with pytest.raises(OSError, match="no name server could resolve master\\.invalid"):
        connect("master.invalid", 29500, 1.0)
