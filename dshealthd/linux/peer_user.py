"""The user at the other end of a TCP connection within this machine."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from dshealthd.core.host import lines_of, read
from dshealthd.linux import sock_diag
from dshealthd.linux.sock_diag import SocketEnd, TcpState
from dshealthd.linux.tcp_tables import parse_end, parse_tcp, plain

if TYPE_CHECKING:
    import socket

_LARGEST = 64 << 20
"""Most bytes of `/proc/net/tcp` that are read: some 400,000 sockets."""


def peer_uid(connection: socket.socket, procfs: str = "/proc") -> int | None:
    """Return the user whose process holds the other end of an open connection.

    None if no process of this machine holds it: an end that is closed or not yet accepted has no
    owner, and the kernel shows it as root's.

    The kernel looks it up by the connection's addresses and ports, at the same cost however many
    sockets there are. Where netlink is refused (seccomp, gVisor, a kernel without `tcp_diag`),
    `/proc/net` is read, which costs 1.6 µs for each socket. OSError if that cannot be read either.
    """
    here, there = _end(connection.getsockname()), _end(connection.getpeername())
    try:
        return _from_kernel(here, there)
    except (OSError, sock_diag.MalformedReply, sock_diag.Interrupted):
        return _from_files(here, there, procfs)


def _from_kernel(here: SocketEnd, there: SocketEnd) -> int | None:
    try:
        found = sock_diag.lookup(there, here)
    except FileNotFoundError:
        sock_diag.lookup(here, there)  # which exists: refused too where the kernel has no tcp_diag
        return None
    if found is None or found.state != TcpState.ESTABLISHED or not found.inode:
        return None
    return found.uid


def _from_files(here: SocketEnd, there: SocketEnd, procfs: str) -> int | None:
    port = f":{there.port:04X} "
    for table in ("tcp", "tcp6"):
        # Most lines are skipped at a hundredth of the cost.
        lines = lines_of(read(f"{procfs}/self/net/{table}", _LARGEST))
        for row in parse_tcp("\n".join(line for line in lines if port in line)):
            # Only a socket that a process holds has an inode.
            if (
                (row.state == TcpState.ESTABLISHED and row.inode)
                and parse_end(row.own) == there
                and parse_end(row.other) == here
            ):
                return row.uid
    return None


def _end(name: tuple[str, int]) -> SocketEnd:
    """Return an end of a connection in normal form: IPv4 mapped to IPv6 becomes IPv4."""
    return SocketEnd(plain(ipaddress.ip_address(name[0].partition("%")[0])), name[1])
