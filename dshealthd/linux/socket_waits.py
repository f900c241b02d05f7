"""Whom processes wait for: over a TCP connection, at a terminal, or on a port for clients. By the
system call of the main thread, the descriptors that it waits for, and the sockets of its network
namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import struct
from collections.abc import Collection, Iterable, Iterator

from dshealthd.core.host import Host, lines_of, read
from dshealthd.linux.local_network import local_ports
from dshealthd.linux.process import open_files, read_memory
from dshealthd.linux.sock_diag import SocketEnd, TcpState
from dshealthd.linux.socket_owners import parse_inode
from dshealthd.linux.tcp_tables import TcpRow, parse_end, parse_tcp

_RECEIVE, _POLL, _EPOLL, _SELECT = "receive", "poll", "epoll", "select"
_CALLS = {
    "x86_64": {
        **dict.fromkeys((0, 45, 47), _RECEIVE),  # read, recvfrom, recvmsg
        **dict.fromkeys((7, 271), _POLL),  # poll, ppoll
        **dict.fromkeys((232, 281, 441), _EPOLL),  # epoll_wait, epoll_pwait, epoll_pwait2
        **dict.fromkeys((23, 270), _SELECT),  # select, pselect6: readline at a prompt
    },
    "aarch64": {
        **dict.fromkeys((63, 207, 212), _RECEIVE),
        73: _POLL,
        72: _SELECT,
        **dict.fromkeys((22, 441), _EPOLL),
    },
}
"""System calls by their numbers (`asm/unistd.h`)."""
_POLLED = struct.Struct("=iHH")
"""A `struct pollfd`."""
_SET = 1024
"""Most descriptors in an `fd_set` (FD_SETSIZE)."""
MOST = 64
"""Most descriptors of a poll that are read: a client waits for the connections of one request."""
TABLE = 4 << 20
"""Most bytes of a table of connections that are read: some 25,000 sockets, 40 ms."""
TERMINAL = "input from a terminal"
"""Whom a process waits for at a prompt, such as a debugger's in its own program."""
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def peers_awaited(host: Host, pids: Iterable[int]) -> dict[int, SocketEnd | str]:
    """Return whom the main threads of processes wait for, by pid: TERMINAL, or the other ends of
    the TCP connections over which they wait for data, with nothing left that these have not
    acknowledged.

    Processes of one network namespace; without those that wait for something else, that have ended,
    and that may not be traced. Waits while a process executes another program. Each pid is taken
    from `pids` right before the process is read.
    """
    wanted: dict[int, int] = {}
    found: dict[int, SocketEnd | str] = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, ArithmeticError):
            place = host.proc(str(pid))
            for slot in _descriptors(place, read(f"{place}/syscall").split()):
                target = os.readlink(f"{place}/fd/{slot}")
                if target.startswith(_TERMINALS):
                    found[pid] = TERMINAL
                elif (inode := parse_inode(target)) is not None:
                    wanted[inode] = pid
    for row in _table(host, wanted.values()):
        if row.inode in wanted and row.state == TcpState.ESTABLISHED and not row.unacknowledged:
            found.setdefault(wanted[row.inode], parse_end(row.other))
    return found


def ports_served(host: Host, *groups: tuple[Collection[int], int]) -> Iterator[tuple[int, int]]:
    """Yield the ports on which processes of one network namespace listen, with the pid of each, but
    for those that the kernel assigns by itself: a program that others connect to has chosen its
    port.

    Of each group of processes, at most so many descriptors are looked at.
    """
    with contextlib.suppress(OSError, ValueError, ArithmeticError):
        assigned = local_ports(host)
        ports = {
            row.inode: row.port
            for row in _table(host, itertools.chain.from_iterable(pids for pids, _ in groups))
            if row.state == TcpState.LISTEN and row.port not in assigned
        }
        for pids, most in groups if ports else ():
            links = ((pid, link) for pid in pids for link in _links(host, pid))
            for pid, link in itertools.islice(links, most):
                if (inode := parse_inode(link)) in ports:
                    yield pid, ports[inode]


def _links(host: Host, pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended, or access is denied
        yield from open_files(host, pid)


def _table(host: Host, pids: Iterable[int]) -> Iterator[TcpRow]:
    """Yield the sockets of these processes' network namespace."""
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, ArithmeticError):
            for table in ("tcp", "tcp6"):
                yield from parse_tcp(read(host.proc(f"{pid}/net/{table}"), TABLE))
        return


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
    if kind is _SELECT:
        count = min(first, _SET)
        bits = int.from_bytes(read_memory(place, second, (count + 7) // 8), "little")
        return [slot for slot in range(count) if bits >> slot & 1]
    if kind is _POLL:
        polled = read_memory(place, first, _POLLED.size * min(second, MOST))
        whole = len(polled) // _POLLED.size * _POLLED.size
        entries = _POLLED.iter_unpack(polled[:whole])
        return [slot for slot, events, _ in entries if slot >= 0 and events & select.POLLIN]
    return []
