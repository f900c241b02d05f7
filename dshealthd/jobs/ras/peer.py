"""Sockets of RAS: the process at the other end of a connection within this node, and the protocol
(IPv4 or IPv6) over which the NCCL of a process, and so its RAS, reaches its peers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING

from dshealthd.core.host import read_bytes
from dshealthd.linux.netlink import TcpState, dump
from dshealthd.linux.socket_owners import parse_inode

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from dshealthd.core.host import Host

BUDGET = 0.5
"""Seconds of CPU time for the kernel to list the sockets of one port."""
MAX_DESCRIPTORS = 65536
"""Most descriptors of one process that are checked."""


def holder(connection: socket.socket, pids: Iterable[int], host: Host) -> int | None:
    """Return which of these processes has accepted a connection to RAS; None if none has.

    Raises OSError if that cannot be read: netlink may be refused, or the process may be another
    user's.
    """
    port, own_port = connection.getpeername()[1], connection.getsockname()[1]
    sockets = dump(TcpState.ESTABLISHED.mask, (port, port), BUDGET)
    # By both ports: with SO_REUSEPORT many sockets share the server's port, and only the client's
    # port identifies this connection.
    inodes = {found.inode for found in sockets if found.peer_port == own_port and found.inode}
    return next((pid for pid in pids if inodes and _has(host.proc(f"{pid}/fd"), inodes)), None)


def _has(place: str, inodes: set[int]) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), os.scandir(place) as entries:
        for entry in itertools.islice(entries, MAX_DESCRIPTORS):
            with contextlib.suppress(FileNotFoundError):  # closed since
                if parse_inode(os.readlink(entry.path)) in inodes:
                    return True
    return False


TABLE_LIMIT = 16 << 20
"""Bytes of the kernel's table, some 100,000 sockets; a longer one counts as IPv6."""
_MAPPED = b"0000000000000000FFFF0000"
_ANY = b"0" * 32
_LOOPBACK = b"0" * 24 + b"01000000"
_INODE = 9


def parse_bound(table: bytes) -> set[int]:
    """Return the inodes of sockets in `/proc/<pid>/net/tcp6` that are bound to an IPv6 address."""
    found = set()
    for line in table.split(b"\n")[1:]:
        fields = line.split()
        if len(fields) > _INODE and fields[_INODE].isdigit():
            local = fields[1].partition(b":")[0]
            if local not in {_ANY, _LOOPBACK} and not local.startswith(_MAPPED):
                found.add(int(fields[_INODE]))
    return found


def may_use_ipv6(host: Host, pid: int) -> bool:
    """Return whether NCCL may reach its peers over IPv6. OSError if that is unknown."""
    try:
        table = read_bytes(host.proc(f"{pid}/net/tcp6"), TABLE_LIMIT)
    except FileNotFoundError:
        return not os.path.exists(host.proc(f"{pid}/net/tcp"))  # a kernel without IPv6
    if len(table) >= TABLE_LIMIT:
        return True
    bound = parse_bound(table)
    if not bound:
        return False
    with os.scandir(host.proc(f"{pid}/fd")) as entries:
        for number, entry in enumerate(itertools.islice(entries, MAX_DESCRIPTORS + 1)):
            with contextlib.suppress(FileNotFoundError):  # closed since
                if number == MAX_DESCRIPTORS or parse_inode(os.readlink(entry.path)) in bound:
                    return True
    return False
