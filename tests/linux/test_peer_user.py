"""Who holds the other end of a connection within this machine."""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from dshealthd.linux import sock_diag, socket_owners
from dshealthd.linux.peer_user import peer_uid
from tests.waiting import until


def states(client: socket.socket) -> set[str]:
    """Return the states of both ends, as `/proc/net/tcp` has them."""
    port = f":{client.getsockname()[1]:04X} "
    with open("/proc/net/tcp", encoding="ascii") as lines:
        return {line.split()[3] for line in lines if port in line}


@pytest.fixture(params=["netlink", "files"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the owner is looked up; the files are read only where netlink is refused."""

    def refused(*_: object) -> NoReturn:
        raise OSError(errno.EAFNOSUPPORT, "refused")

    def unread(*_: object) -> NoReturn:
        raise AssertionError("the tables are not read where netlink answers")

    if request.param == "files":
        monkeypatch.setattr(sock_diag, "lookup", refused)
    else:
        monkeypatch.setattr(socket_owners, "read", unread)
    return str(request.param)


@pytest.mark.usefixtures("source")
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


@pytest.mark.usefixtures("source")
def test_not_accepted() -> None:
    """A connection that the kernel alone has taken has no owner."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert peer_uid(client) is None


@pytest.mark.usefixtures("source")
def test_closed() -> None:
    """An end that is closed has no owner; the kernel shows it with uid 0, which would be root's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        server.accept()[0].close()
        until(lambda: states(client) == {"05", "08"})  # FIN_WAIT2 and CLOSE_WAIT
        assert peer_uid(client) is None


@pytest.mark.usefixtures("source")
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


def test_a_mapped_address() -> None:
    """An IPv6 socket that connects to an IPv4 address has an owner at the other end as well."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.1", server.getsockname()[1]))
        with server.accept()[0]:
            assert peer_uid(client) == os.geteuid()


@pytest.mark.parametrize("error", [
    FileNotFoundError(errno.ENOENT, "netlink: No such file or directory"),
    sock_diag.Interrupted("replies were lost"),
    sock_diag.MalformedReply("no socket"),
])  # fmt: skip
def test_a_kernel_that_cannot_tell(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read where an answer is lost or none, and where the kernel has no `tcp_diag`:
    ENOENT for a socket that exists means that.
    """

    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(sock_diag, "lookup", fail)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0],
    ):
        assert peer_uid(client) == os.geteuid()


@pytest.mark.usefixtures("source")
def test_the_other_end_is_elsewhere() -> None:
    """An end that is in no table of this machine has no owner."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = ("192.0.2.1", 9)  # for documentation: nobody has it
        client: Any = SimpleNamespace(getsockname=server.getsockname, getpeername=lambda: other)
        assert peer_uid(client) is None


def test_one_lookup_costs_the_same_among_many_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sends the one socket with these addresses: no table is walked or read."""
    sizes = []
    receive = sock_diag._datagram

    def measured(diag: socket.socket) -> bytes:
        sizes.append(len(data := receive(diag)))
        return data

    monkeypatch.setattr(sock_diag, "_datagram", measured)
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        crowd = [socket.create_connection(server.getsockname()) for _ in range(150)]
        held = [server.accept()[0] for _ in crowd]
        try:
            assert peer_uid(crowd[-1]) == os.geteuid()
        finally:
            for one in (*crowd, *held):
                one.close()
    (size,) = sizes
    assert size < 2 * 88  # of a header and one socket
