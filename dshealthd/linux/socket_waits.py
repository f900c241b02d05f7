"""Whether processes wait for data over a TCP connection, and from whom: by the system call of the
main thread, the descriptors that it waits for, and the connections of its network namespace.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from typing import TYPE_CHECKING

from dshealthd.core.host import lines_of, read
from dshealthd.linux.peer_user import parse_end
from dshealthd.linux.socket_owners import parse_inode

if TYPE_CHECKING:
    from collections.abc import Iterable

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
"""System calls by their numbers (`asm/unistd.h`); not select, which none of today's clients
uses."""
_POLLED = struct.Struct("=iHH")
"""A `struct pollfd`."""
MOST = 64
"""Most descriptors of a poll that are read: a client waits for the connections of one request."""
TABLE = 4 << 20
"""Most bytes of a table of connections that are read: some 25,000 sockets, 40 ms."""
_ESTABLISHED = "01"


def awaited(host: Host, pids: Iterable[int]) -> dict[int, SocketEnd]:
    """Return the other ends of the TCP connections over which the main threads of processes wait
    for data, with nothing left that these ends have not acknowledged, by pid.

    Processes of one network namespace; without those that wait for something else, that have ended,
    and that may not be traced. Waits while a process executes another program.
    """
    wanted: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, ArithmeticError):
            place = host.proc(str(pid))
            for slot in _descriptors(place, read(f"{place}/syscall").split()):
                if (inode := parse_inode(os.readlink(f"{place}/fd/{slot}"))) is not None:
                    wanted[inode] = pid
    found: dict[int, SocketEnd] = {}
    with contextlib.suppress(OSError, ValueError, ArithmeticError):
        for table in ("tcp", "tcp6") if wanted else ():
            place = host.proc(str(next(iter(wanted.values()))))
            for line in lines_of(read(f"{place}/net/{table}", TABLE))[1:]:
                _, _, there, state, queues, _, _, _, _, number, *_ = line.split()
                if int(number) in wanted and state == _ESTABLISHED and not int(queues[:8], 16):
                    found[wanted[int(number)]] = parse_end(there)
    return found


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
