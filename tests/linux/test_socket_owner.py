"""Who holds the other end of a connection within this machine."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from dshealthd.linux.socket_owner import peer_uid

if TYPE_CHECKING:
    from collections.abc import Callable


def wait(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def states(client: socket.socket) -> set[str]:
    """Return the states of both ends, as `/proc/net/tcp` has them."""
    port = f":{client.getsockname()[1]:04X} "
    with open("/proc/net/tcp", encoding="ascii") as lines:
        return {line.split()[3] for line in lines if port in line}


@pytest.mark.parametrize(
    ("listen", "connect"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::1")],
)
def test_accepted(listen: str, connect: str) -> None:
    """The user is known for IPv4, IPv6, and IPv4 that an IPv6 socket has accepted."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server:
        port = server.getsockname()[1]
        with socket.create_connection((connect, port)) as client, server.accept()[0]:
            assert peer_uid(client) == os.geteuid()


def test_not_accepted() -> None:
    """A connection that the kernel alone has taken has no owner."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert peer_uid(client) is None


def test_closed() -> None:
    """An end that is closed has no owner; the kernel shows it with uid 0, which would be root's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        server.accept()[0].close()
        wait(lambda: states(client) == {"05", "08"})  # FIN_WAIT2 and CLOSE_WAIT
        assert peer_uid(client) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be another user")
def test_another_user() -> None:
    """A process of another user that has accepted is told as that user."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ready, stay = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            accepted, _ = server.accept()
            os.write(ready[1], b"x")
            os.read(stay[0], 1)
            accepted.close()
            os._exit(0)
        try:
            with socket.create_connection(server.getsockname()) as client:
                os.read(ready[0], 1)
                assert peer_uid(client) == 65534
        finally:
            os.write(stay[1], b"x")
            os.waitpid(pid, 0)
            for descriptor in (*ready, *stay):
                os.close(descriptor)
