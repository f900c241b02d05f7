"""Whether a process uses IPv6: by the addresses to which its sockets are bound."""

from __future__ import annotations

import errno
import os

from dshealthd.core.host import Host, read
from dshealthd.linux.process import open_files
from dshealthd.linux.socket_owners import parse_inode
from dshealthd.linux.tcp_tables import parse_end, parse_tcp

MAX_DESCRIPTORS = 65536
"""Most descriptors of one process that are checked."""
TABLE_LIMIT = 16 << 20
"""Bytes of the kernel's table, some 100,000 sockets; a longer one counts as IPv6."""
_ANY, _LOOPBACK = bytes(16), bytes(15) + b"\1"
"""Addresses that the sockets of any process have."""


def parse_bound(table: str) -> set[int]:
    """Return the inodes of sockets in a `tcp6` that are bound to an IPv6 address. ValueError."""
    rows = [(row.inode, parse_end(row.own).address) for row in parse_tcp(table)]
    return {inode for inode, own in rows if len(own) == len(_ANY) and own not in (_ANY, _LOOPBACK)}


def may_use_ipv6(host: Host, pid: int) -> bool:
    """Return whether a process, and so its NCCL, may reach its peers over IPv6: whether it has a
    socket that is bound to an address of an interface. OSError if that is unknown.
    """
    try:
        table = read(host.proc(f"{pid}/net/tcp6"), TABLE_LIMIT)
    except FileNotFoundError:
        return not os.path.exists(host.proc(f"{pid}/net/tcp"))  # a kernel without IPv6
    if len(table) >= TABLE_LIMIT:
        return True
    try:
        bound = parse_bound(table)
    except (ValueError, ArithmeticError) as error:
        raise OSError(errno.EINVAL, str(error)) from error
    if not bound:
        return False
    return any(
        number == MAX_DESCRIPTORS or parse_inode(link) in bound
        for number, link in enumerate(open_files(host, pid))
    )
