"""The user at the other end of a TCP connection within this machine."""

from __future__ import annotations

import ipaddress
import sys
from typing import TYPE_CHECKING

from dshealthd.core.host import lines_of, read
from dshealthd.linux import sock_diag
from dshealthd.linux.sock_diag import SocketEnd, TcpState

if TYPE_CHECKING:
    import socket


_ESTABLISHED = "01"
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
    ports = f":{there.port:04X} ", f":{here.port:04X} "
    for table in ("tcp", "tcp6"):
        for line in lines_of(read(f"{procfs}/self/net/{table}", _LARGEST))[1:]:
            if ports[0] not in line or ports[1] not in line:
                continue  # skips most lines, at a hundredth of the cost
            fields = line.split()
            if (
                fields[3] == _ESTABLISHED
                and parse_end(fields[1]) == there
                and parse_end(fields[2]) == here
                and fields[9] != "0"  # the inode, which only a socket held by a process has
            ):
                return int(fields[7])
    return None


def _end(name: tuple[str, int]) -> SocketEnd:
    """Return an end of a connection in normal form: IPv4 mapped to IPv6 becomes IPv4."""
    return SocketEnd(_plain(ipaddress.ip_address(name[0].partition("%")[0])), name[1])


def parse_end(text: str) -> SocketEnd:
    """Return an end of a connection as `/proc/net/tcp` writes it: an address as words in native
    byte order, and a port. ValueError if malformed.
    """
    words, _, port = text.partition(":")
    raw = bytes.fromhex(words)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return SocketEnd(_plain(ipaddress.ip_address(raw)), int(port, 16))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).packed
