"""Connections to the masters of runs: told apart, and made only where nobody has met yet.

Real processes and sockets, in a network namespace of the test's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors import job_master
from dshealthd.collectors.job_master import ConnectionOutcome, JobMaster, connect
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench, values
from tests.environments import wait_for_environment
from tests.netns import connection, listener, network_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "10.99.0.1"
"""An address of the namespace that is not the loopback's own."""


@pytest.fixture
def network() -> Iterator[None]:
    """A network with one address that ranks can meet at, and no other node."""
    with network_namespace():
        done = subprocess.run(
            ["ip", "address", "add", f"{HERE}/32", "dev", "lo"], check=False, capture_output=True
        )
        if done.returncode:
            pytest.skip(f"no address can be added: {done.stderr.decode()}")
        yield


@contextlib.contextmanager
def rank(number: int, port: int, address: str = HERE) -> Iterator[None]:
    """Run a rank that only waits."""
    process = subprocess.Popen(
        ["sleep", "600"],
        env={
            "PATH": os.defpath,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": str(number),
            "LOCAL_RANK": "0",
        },
    )
    try:
        wait_for_environment(process.pid)
        yield
    finally:
        process.kill()
        process.wait()


class Agent(Bench):
    """The collector, round by round, on a node with one run."""

    def __init__(self) -> None:
        super().__init__("job_master")

    def outcomes(self) -> list[str]:
        """Return the outcomes of a round."""
        result = self.collect()
        assert (result.outcome, result.faults) == (CollectionOutcome.OK, ())
        return [outcome for _, _, outcome in values(result, job_master.CONNECTION)]


def free_port() -> int:
    """Return a port that is free in the namespace, and high enough for a run."""
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
    """Where no name server answers, as in this network, nothing is said of the master: it is a
    fault, and no sample that an alert could take for a verdict.
    """
    with pytest.raises(OSError, match="no name server could resolve master\\.invalid"):
        connect("master.invalid", 29500, 1.0)
    with rank(1, 29500, "master.invalid"):
        result = Agent().collect()
    assert result.samples == ()
    (fault,) = result.faults
    assert "no name server could resolve" in fault.detail


def test_a_run_is_asked_for_until_it_has_met(network: None) -> None:  # noqa: ARG001
    """Refused, then answered and not asked again, then connected, and never touched from then on."""
    port, agent = free_port(), Agent()
    with rank(1, port):
        assert agent.outcomes() == ["refused"]
        with listener(HERE, port) as made:
            made.settimeout(60)
            assert agent.outcomes() == ["ok"]
            with made.accept()[0] as seen:
                seen.settimeout(60)
                assert seen.recv(1) == b""  # it carried nothing, and is closed
            assert agent.outcomes() == ["ok"]
            made.settimeout(0)
            with pytest.raises(BlockingIOError):
                made.accept()
            client, server = connection(made)  # as a rank's own
            assert agent.outcomes() == ["connected"]
            client.close()
            server.close()
            agent.now += 10 * job_master.AGAIN
            assert agent.outcomes() == ["connected"]
            with pytest.raises(BlockingIOError):
                made.accept()
        assert agent.outcomes() == ["connected"]


@pytest.mark.parametrize(
    ("number", "port", "address"),
    [(0, 29877, HERE), (1, 29877, "127.0.0.1"), (1, 22, HERE), (1, 0, HERE), (1, 70000, HERE)],
)
def test_what_is_not_asked_for(
    network: None,  # noqa: ARG001
    number: int,
    port: int,
    address: str,
) -> None:
    """Rank 0's own node, the loopback, and ports that no run meets at are left alone."""
    with rank(number, port, address):
        assert Agent().outcomes() == []


def test_an_old_run_is_left_alone(network: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Who has not met for half an hour, or met before the agent began, is not touched."""
    monkeypatch.setattr(job_master, "YOUNG", -1.0)
    port = free_port()
    with rank(1, port):
        assert Agent().outcomes() == []


def test_off_by_default() -> None:
    """A store without libuv stalled for 5 s after one such connection of a few."""
    assert not JobMaster.Options().enabled


def test_a_store_with_libuv_is_not_disturbed() -> None:
    """PyTorch's store serves its ranks on while the agent keeps connecting to it."""
    distributed = pytest.importorskip("torch.distributed")
    patience = timedelta(seconds=60)
    options = {"timeout": patience, "wait_for_workers": False, "use_libuv": True}
    master = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, **options)
    rank = distributed.TCPStore("127.0.0.1", master.port, 2, is_master=False, **options)
    for number in range(1, 41):
        assert connect("127.0.0.1", master.port, 20.0) is ConnectionOutcome.OK
        assert rank.add("steps", 1) == number
