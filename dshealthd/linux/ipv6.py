"""Whether a process uses IPv6: by the addresses to which its sockets are bound."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING

from dshealthd.core.host import read_bytes
from dshealthd.linux.socket_owners import parse_inode

if TYPE_CHECKING:
    from dshealthd.core.host import Host

MAX_DESCRIPTORS = 65536
"""Most descriptors of one process that are checked."""
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
    """Return whether a process, and so its NCCL, may reach its peers over IPv6: whether it has a
    socket that is bound to an address of an interface. OSError if that is unknown.
    """
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
