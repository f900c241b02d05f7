"""TCP sockets from the kernel over NETLINK_SOCK_DIAG.

Requests, replies, and the dump between them; or the one socket with given addresses and ports.

The request is the legacy `TCPDIAG_GETSOCK` of `linux/inet_diag.h`: unlike `SOCK_DIAG_BY_FAMILY` it
walks the socket table once for both families. The request filters states and ports in the kernel,
as filling in a reply costs it several times as much as a skip.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

TIME_WAIT_TIMER = 3
"""Timer of the small sockets in place of a closed one: TIME_WAIT, and most of FIN_WAIT2."""
_SOCK_DIAG = 4
_TCPDIAG_GETSOCK = 18
_REQUEST_ONE = 0x1
_REQUEST_DUMP = _REQUEST_ONE | 0x300
_DUMP_INTERRUPTED = 0x10
_NOOP, _ERROR, _DONE, _OVERRUN = 1, 2, 3, 4
_BYTECODE = 1
_SOURCE_PORT_AT_LEAST, _SOURCE_PORT_AT_MOST = 2, 3
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
_REQUEST = struct.Struct("=4B48xII")  # family, lengths, extensions; socket id; states; generation
_EXACT = struct.Struct("=4B 4s16s16s I8s II")
"""As `_REQUEST`, with the socket's id: ports, source, destination, interface, cookie."""
_PORTS = struct.Struct("!HH")
_NO_COOKIE = b"\xff" * 8
_ATTRIBUTE = struct.Struct("=HH")
_OPERATION = struct.Struct("=BBH")
_SOCKET = "xBBx HH 56x II"
"""State and timer, ports in network order, user and inode of a `struct inet_diag_msg`."""
_ONE = struct.Struct(f"={_SOCKET}")
_INT = struct.Struct("=i")
_INFO = 2
"""INET_DIAG_INFO, the attribute with a `struct tcp_info`."""
_MOVED = struct.Struct("=120xQQ")
"""Bytes that the other end has acknowledged, and bytes received, in a `tcp_info` (Linux 4.1)."""
_BUFFER = 1 << 16
"""Larger than any message of the kernel in a dump (32 KiB)."""
_ATTEMPTS = 3
_sequences = itertools.count(1)


class TcpState(enum.IntEnum):
    """States of a TCP socket by the kernel's numbers, without closed, which no table has."""

    ESTABLISHED = 1
    SYN_SENT = 2
    SYN_RECV = 3
    FIN_WAIT1 = 4
    FIN_WAIT2 = 5
    TIME_WAIT = 6
    CLOSE_WAIT = 8
    LAST_ACK = 9
    LISTEN = 10
    CLOSING = 11

    @property
    def label(self) -> str:
        """The TCP state as a label value."""
        return self.name.lower()

    @property
    def mask(self) -> int:
        """The TCP state's bit in a netlink request."""
        return 1 << self


EVERY_STATE = sum(state.mask for state in TcpState)


class MalformedReply(ValueError):
    """The kernel's answer is not a valid reply to a dump of TCP sockets."""


class Interrupted(Exception):
    """The table changed during the dump, or replies were lost: the dump is incomplete."""


class SocketEnd(NamedTuple):
    """One end of a connection."""

    address: bytes
    """Packed, 4 or 16 bytes; never IPv4 mapped to IPv6."""
    port: int

    def __str__(self) -> str:
        if len(self.address) == 4:  # noqa: PLR2004 - bytes
            return f"{socket.inet_ntop(socket.AF_INET, self.address)}:{self.port}"
        return f"[{socket.inet_ntop(socket.AF_INET6, self.address)}]:{self.port}"


class TcpSocket(NamedTuple):
    """One TCP socket."""

    state: int
    """As in `TcpState`."""
    timer: int
    """`TIME_WAIT_TIMER` is the one of interest."""
    port: int
    """Its local port."""
    peer_port: int
    """0 for a listener."""
    uid: int
    """The user of the process that made the socket; means nothing without an inode."""
    inode: int
    """As in `/proc/<pid>/fd`; 0 if no process holds the socket: it is not accepted yet, or
    closed."""
    moved: int = 0
    """Bytes that its other end has acknowledged and that it has received, where they are
    requested."""


def _socket(fields: tuple[int, ...], moved: int = 0) -> TcpSocket:
    state, timer, port, peer_port, uid, inode = fields
    return TcpSocket(state, timer, socket.ntohs(port), socket.ntohs(peer_port), uid, inode, moved)


def _moved_bytes(attributes: bytes) -> int:
    """Return the bytes moved according to the attributes of a socket; 0 if they do not tell."""
    position = 0
    while position + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, position)
        if kind == _INFO and length >= _ATTRIBUTE.size + _MOVED.size:
            if position + length > len(attributes):
                break
            return sum(_MOVED.unpack_from(attributes, position + _ATTRIBUTE.size))
        position += max((length + 3) & ~3, _ATTRIBUTE.size)
    return 0


def dump_request(
    states: int, ports: tuple[int, int] | None, sequence: int, *, moved: bool = False
) -> bytes:
    """Return the netlink request for all sockets in `states` (a sum of `TcpState.mask`).

    With `ports`, only for those with a source port from first to last; `moved` requests what they
    have moved, too.
    """
    body = _REQUEST.pack(0, 0, 0, 1 << (_INFO - 1) if moved else 0, states, 0)
    if ports is not None:
        # Two comparisons; each is followed by its port, and jumps to the next one (8 bytes) or past
        # the end, which rejects the socket.
        first, last = ports
        code = b"".join(
            (
                *(_OPERATION.pack(_SOURCE_PORT_AT_LEAST, 8, 20), _OPERATION.pack(0, 0, first)),
                *(_OPERATION.pack(_SOURCE_PORT_AT_MOST, 8, 12), _OPERATION.pack(0, 0, last)),
            )
        )
        body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(code), _BYTECODE) + code
    return (
        _HEADER.pack(_HEADER.size + len(body), _TCPDIAG_GETSOCK, _REQUEST_DUMP, sequence, 0) + body
    )


def lookup(own: SocketEnd, other: SocketEnd) -> TcpSocket | None:
    """Return the socket with these addresses and ports, `own` being its local ones.

    One lookup in the kernel's hash table, however many sockets there are. None if there is only a
    listener there.

    Raises FileNotFoundError if there is none in this network namespace, OSError if netlink is
    refused, MalformedReply, Interrupted. A kernel without `tcp_diag` refuses with ENOENT, too:
    `lookup` of a socket that exists tells which.
    """
    sequence = next(_sequences) & 0xFFFFFFFF
    family = socket.AF_INET if len(own.address) == 4 else socket.AF_INET6  # noqa: PLR2004 - bytes
    body = _EXACT.pack(
        *(family, 0, 0, 0),
        *(_PORTS.pack(own.port, other.port), own.address, other.address),
        *(0, _NO_COOKIE, 0, 0),
    )
    header = _HEADER.pack(_HEADER.size + len(body), _TCPDIAG_GETSOCK, _REQUEST_ONE, sequence, 0)
    with _diag() as diag:
        diag.sendto(header + body, (0, 0))
        sockets, _ = parse(_datagram(diag), sequence)
    if not sockets:
        raise MalformedReply("no socket")
    found = sockets[0]
    return found if (found.port, found.peer_port) == (own.port, other.port) else None  # a listener


def parse(buffer: bytes, sequence: int, *, moved: bool = False) -> tuple[list[TcpSocket], bool]:
    """Return the sockets in one netlink datagram of the reply to `sequence`, and whether the reply
    ends with it; with what they have `moved`, if that was requested.

    Raises OSError for a refusal, Interrupted, MalformedReply.
    """
    sockets: list[TcpSocket] = []
    position, end = 0, len(buffer)
    while position < end:
        if end - position < _HEADER.size:
            raise MalformedReply(f"{end - position} bytes after the last message")
        length, kind, flags, answered, _ = header = _HEADER.unpack_from(buffer, position)
        if length < _HEADER.size or length > end - position:
            raise MalformedReply(f"a message of {length} bytes, where {end - position} are left")
        if answered != sequence:
            raise MalformedReply(f"a reply to request {answered} instead of {sequence}")
        if flags & _DUMP_INTERRUPTED:
            raise Interrupted("the socket table changed during the dump")
        if kind == _TCPDIAG_GETSOCK:
            more = length - _HEADER.size - _ONE.size  # attributes
            if more < 0:
                raise MalformedReply(f"a socket of {length} bytes")
            if position == 0 and not moved and _uniform(buffer, length, _HEADER.pack(*header)):
                layout = f"={_HEADER.size}x {_SOCKET} {more}x"
                return [*map(_socket, struct.iter_unpack(layout, buffer))], False
            attributes = buffer[position + length - more : position + length] if moved else b""
            fields = _ONE.unpack_from(buffer, position + _HEADER.size)
            sockets.append(_socket(fields, _moved_bytes(attributes)))
        elif kind == _DONE:
            _refusal(buffer, position, length)
            return sockets, True
        elif kind == _ERROR:
            _refusal(buffer, position, length)
            raise MalformedReply("an unexpected acknowledgment")
        elif kind == _OVERRUN:
            raise Interrupted("replies were lost")
        elif kind != _NOOP:
            raise MalformedReply(f"a message of type {kind}")
        position += (length + 3) & ~3
    return sockets, False


def _uniform(buffer: bytes, length: int, header: bytes) -> bool:
    """Return whether the netlink datagram holds only sockets with this header, as in large dumps,
    so that it can be unpacked at once, for little more than half of the cost.
    """
    number, rest = divmod(len(buffer), length)
    return (
        not rest
        and not length & 3
        and all(buffer[at::length] == header[at : at + 1] * number for at in range(_HEADER.size))
    )


def _refusal(buffer: bytes, position: int, length: int) -> None:
    """Raise the OSError in a netlink error or the end of a dump; return if there is none."""
    if length < _HEADER.size + _INT.size:
        raise MalformedReply(f"a result of {length} bytes")
    (code,) = _INT.unpack_from(buffer, position + _HEADER.size)
    if code < 0:
        number = -code
        raise OSError(number, f"netlink: {os.strerror(number)}")


def dump(
    states: int,
    ports: tuple[int, int] | None,
    budget: float,
    cpu_time: Callable[[], float] = time.thread_time,
    *,
    moved: bool = False,
) -> list[TcpSocket]:
    """Return the sockets of this network namespace, from the kernel over netlink.

    Arguments as for `dump_request`; `budget` is in seconds of this thread's CPU time. A dump never
    waits, so wall time beyond that is a node that has no CPU for the agent, not a slow dump.

    Raises OSError, including TimeoutError; Interrupted if the dump was incomplete in three
    attempts; MalformedReply.
    """
    end = cpu_time() + budget
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(Interrupted):
            return _dump(states, ports, end, cpu_time, moved=moved)
    return _dump(states, ports, end, cpu_time, moved=moved)


def bytes_moved(states: int, budget: float) -> dict[int, int]:
    """Return the bytes that each socket has sent and received, by inode; otherwise as `dump`."""
    found = dump(states, None, budget, moved=True)
    return {one.inode: one.moved for one in found if one.inode}


def _dump(
    states: int,
    ports: tuple[int, int] | None,
    end: float,
    cpu_time: Callable[[], float],
    *,
    moved: bool,
) -> list[TcpSocket]:
    sequence = next(_sequences) & 0xFFFFFFFF
    found: list[TcpSocket] = []
    done = False
    # The kernel makes the first datagram during the send and each further one during a receive, so
    # there is never anything to wait for.
    with _diag() as diag:
        diag.sendto(dump_request(states, ports, sequence, moved=moved), (0, 0))
        while not done:
            if cpu_time() > end:
                message = "the dump of TCP sockets takes too much CPU time"
                raise TimeoutError(errno.ETIMEDOUT, message)
            sockets, done = parse(_datagram(diag), sequence, moved=moved)
            found += sockets
    return found


def _diag() -> socket.socket:
    return socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _SOCK_DIAG
    )


def _datagram(diag: socket.socket) -> bytes:
    while True:
        try:
            data, _, flags, (sender, _) = diag.recvmsg(_BUFFER)
        except BlockingIOError as error:
            raise TimeoutError(errno.ETIMEDOUT, "no answer to the dump of TCP sockets") from error
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                raise Interrupted("replies were lost") from error
            raise
        if flags & socket.MSG_TRUNC or not data:
            raise MalformedReply("a datagram that is cut off or empty")
        if sender == 0:  # ignore messages of other processes
            return data
