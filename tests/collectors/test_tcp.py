"""Sockets by state: on a fixture, and against `ss` in a namespace of the test's own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.tcp_sockets import FEW
from tests.collectors.bench import Bench
from tests.netns import V4, V6, connection, leave_time_wait, listener, network_namespace, ss


@pytest.fixture
def every_state() -> Iterator[None]:
    """Give sockets of both families in every state that lasts, in a namespace of their own."""
    with network_namespace():
        ends: list[socket.socket] = []
        for address in (V4, V6):
            port = listener(address)
            ends += [port, *connection(port), *connection(port)]
            leave_time_wait(port, 3, server=True)
            leave_time_wait(port, 2, server=False)
            client, accepted = connection(port)
            client.close()  # stays in FIN_WAIT2 while the other end, in CLOSE_WAIT, does not close
            full = listener(address, backlog=0)
            waiting = [socket.socket(full.family) for _ in range(3)]
            for connecting in waiting:
                connecting.setblocking(False)  # noqa: FBT003 - its only argument
                connecting.connect_ex(full.getsockname())
            ends += [accepted, full, *waiting]
        end = time.monotonic() + 60
        while ss()["fin_wait2"] < 2 and time.monotonic() < end:
            time.sleep(0.01)  # a delayed acknowledgment
        yield
        for made in ends:
            made.close()


@pytest.mark.usefixtures("every_state")
def test_every_state_agrees_with_ss() -> None:
    """With few sockets in TIME_WAIT, every state of both families is what `ss` says."""
    ours = {labels[0]: value for _, labels, value in Bench("tcp").collect().samples}
    truth = ss()
    assert ours == {state.label: truth[state.label] for state in TcpState}
    assert (truth["listen"], truth["time_wait"], truth["established"]) == (4, 10, 12)
    assert truth["syn_sent"] == 4
    assert truth["close_wait"] == truth["fin_wait2"] == 2


@pytest.mark.usefixtures("every_state")
def test_many_in_time_wait_agree_with_ss() -> None:
    """All states are what `ss` says where sockstat counts FIN_WAIT2 in TIME_WAIT."""
    for address in (V4, V6):
        port = listener(address)
        leave_time_wait(port, FEW // 2 + 50, server=True)
        port.close()
    ours = {labels[0]: value for _, labels, value in Bench("tcp").collect().samples}
    truth = ss()
    assert ours == {state.label: truth[state.label] for state in TcpState}
    assert truth["time_wait"] > FEW
    assert truth["fin_wait2"] == 2


def test_an_empty_namespace_has_no_sockets() -> None:
    """Where the kernel says that there are none, every state is 0."""
    with network_namespace():
        result = Bench("tcp").collect()
    assert {value for _, _, value in result.samples} == {0}
    assert len(result.samples) == len(TcpState)
