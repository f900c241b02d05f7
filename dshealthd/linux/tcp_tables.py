"""The tables `/proc/net/tcp` and `tcp6`: a line for each socket of a network namespace."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator
from typing import NamedTuple

from dshealthd.core.host import lines_of
from dshealthd.linux.sock_diag import SocketEnd


class TcpRow(NamedTuple):
    """A line; named as in `TcpSocket` what netlink tells as well."""

    own: str
    """Address and port of this end, for `parse_end`."""
    other: str
    port: int
    peer_port: int
    state: int
    timer: int
    unacknowledged: int
    """Bytes that the other end has not acknowledged."""
    uid: int
    inode: int


def parse_tcp(text: str) -> Iterator[TcpRow]:
    """Yield the sockets of `/proc/net/tcp` or `tcp6`. ValueError names a malformed line."""
    for line in lines_of(text):
        if line.lstrip().startswith("sl "):  # the heading
            continue
        try:
            _, own, other, state, queues, timer, _, uid, _, inode, *_ = line.split()
            port, peer_port = (int(end.rpartition(":")[2], 16) for end in (own, other))
            kind, sent = (int(pair.partition(":")[0], 16) for pair in (timer, queues))
            row = (own, other, port, peer_port, int(state, 16), kind, sent, int(uid), int(inode))
            yield TcpRow(*row)
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f"not a socket: {line[:60]!r}") from error


def parse_end(text: str) -> SocketEnd:
    """Return an end as a table has it: an address as words in native byte order. ValueError."""
    words, _, port = text.partition(":")
    raw = bytes.fromhex(words)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return SocketEnd(plain(ipaddress.ip_address(raw)), int(port, 16))


def plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
    """Return an address packed, IPv4 mapped to IPv6 as IPv4."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).packed
