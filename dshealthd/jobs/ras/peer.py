"""The process at the other end of a connection to RAS within this node."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING

from dshealthd.jobs.heartbeats.page import MAX_DESCRIPTORS
from dshealthd.linux.sock_diag import TcpState, dump
from dshealthd.linux.socket_owners import parse_inode

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from dshealthd.core.host import Host

BUDGET = 0.5
"""Seconds of CPU time for the kernel to list the sockets of one port."""


def holder(connection: socket.socket, pids: Iterable[int], host: Host) -> int | None:
    """Return which of these processes has accepted a connection to RAS; None if none has.

    Raises OSError if that cannot be read: netlink may be refused, or the process may be another
    user's.
    """
    port, own_port = connection.getpeername()[1], connection.getsockname()[1]
    sockets = dump(TcpState.ESTABLISHED.mask, (port, port), BUDGET)
    # By both ports: with SO_REUSEPORT many sockets share the server's port, and only the client's
    # port identifies this connection.
    inodes = {found.inode for found in sockets if found.peer_port == own_port}
    return next((pid for pid in pids if _has(host.proc(f"{pid}/fd"), inodes)), None)


def _has(place: str, inodes: set[int]) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), os.scandir(place) as entries:
        for entry in itertools.islice(entries, MAX_DESCRIPTORS):
            with contextlib.suppress(FileNotFoundError):  # closed since
                if parse_inode(os.readlink(entry.path)) in inodes:
                    return True
    return False
