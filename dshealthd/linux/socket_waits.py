"""Whether a process waits for data over a TCP connection, and from whom: by the system call of its
main thread, the descriptors that it waits for, and the connections of its network namespace.
"""

from __future__ import annotations

import os
import select
import struct
from typing import TYPE_CHECKING

from dshealthd.core.host import lines_of, read
from dshealthd.linux.socket_owners import parse_end, parse_inode

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.linux.sock_diag import SocketEnd

_RECEIVE, _POLL, _EPOLL = "receive", "poll", "epoll"
_CALLS = {
    "x86_64": {
        **dict.fromkeys((0, 45, 47), _RECEIVE),  # read, recvfrom, recvmsg
        **dict.fromkeys((7, 271), _POLL),  # poll, ppoll
        **dict.fromkeys((232, 281, 441), _EPOLL),  # epoll_wait, epoll_pwait, epoll_pwait2
    },
    "aarch64": {
        **dict.fromkeys((63, 207, 212), _RECEIVE),
        73: _POLL,
        **dict.fromkeys((22, 441), _EPOLL),
    },
}
"""System calls by their numbers (`asm/unistd.h`); not select, which none of today's clients uses."""
_POLLED = struct.Struct("=iHH")
"""A `struct pollfd`."""
MOST = 64
"""Most descriptors of a poll that are read: a client waits for the connections of one request."""
TABLE = 4 << 20
"""Most bytes of a table of connections that are read: some 25,000 sockets, 40 ms."""
_ESTABLISHED = "01"


def awaited(host: Host, pid: int) -> SocketEnd | None:
    """Return the other end of a TCP connection over which the main thread of a process waits for
    data, with nothing left that this end has not acknowledged; None if it waits for something else.

    OSError, ValueError if it cannot be read, which takes the right to trace the process. Waits while
    the process executes another program.
    """
    place = host.proc(str(pid))
    inodes = set()
    for slot in _descriptors(place, read(f"{place}/syscall").split()):
        inodes.add(parse_inode(os.readlink(f"{place}/fd/{slot}")))
    inodes.discard(None)
    if inodes:
        for table in (f"{place}/net/tcp", f"{place}/net/tcp6"):
            for line in lines_of(read(table, TABLE))[1:]:
                fields = line.split()
                if len(fields) > 9 and int(fields[9]) in inodes and fields[3] == _ESTABLISHED:  # noqa: PLR2004 - the inode
                    unacknowledged, _, _ = fields[4].partition(":")
                    return None if int(unacknowledged, 16) else parse_end(fields[2])
    return None


def _descriptors(place: str, call: list[str]) -> list[int]:
    """Return the descriptors from which a system call waits for data."""
    if len(call) < 3 or (number := int(call[0])) < 0:  # noqa: PLR2004 - it runs, or is in no call
        return []
    kind = _CALLS.get(os.uname().machine, {}).get(number)
    first, second = (int(argument, 16) for argument in call[1:3])
    if kind is _RECEIVE:
        return [first]
    if kind is _EPOLL:
        slot = first
        lines = lines_of(read(f"{place}/fdinfo/{slot}"))
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")][:MOST]
    if kind is _POLL:
        memory = os.open(f"{place}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            polled = os.pread(memory, _POLLED.size * min(second, MOST), first)
        finally:
            os.close(memory)
        whole = len(polled) // _POLLED.size * _POLLED.size
        entries = _POLLED.iter_unpack(polled[:whole])
        return [slot for slot, events, _ in entries if slot >= 0 and events & select.POLLIN]
    return []
