"""TCP sockets from the kernel over NETLINK_SOCK_DIAG.

Requests, replies, and the dump between them; or the one socket with given addresses and ports.

The request is the legacy `TCPDIAG_GETSOCK` of `linux/inet_diag.h`: unlike `SOCK_DIAG_BY_FAMILY` it
walks the socket table once for both families. The request filters states and ports in the kernel,
as filling in a reply costs it several times as much as a skip. Replies are kept as the kernel wrote
them, one record of fixed size per socket, and read by column: a loop over sockets in Python would
cost more than the walk.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import os
import socket
import struct
import sys
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class TcpState(enum.IntEnum):
    """States of a TCP socket by the kernel's numbers.

    A closed socket is in no table, so it is never seen.
    """

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
TIME_WAIT_TIMER = 3
"""Timer of the small sockets that stand in for a closed one.

These are all sockets in TIME_WAIT, and most in FIN_WAIT2.
"""

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
_SOCKET = struct.Struct(
    "=BBBB HH 48x II II"
)  # family, state, timer, retransmits; ports; ids; queues; uid, inode
_INT = struct.Struct("=i")
RECORD = _HEADER.size + 72
"""Bytes of a socket: its netlink header and `struct inet_diag_msg`, without the attributes that may
follow.
"""
_AT_STATE, _AT_TIMER, _AT_SOURCE, _AT_DESTINATION, _AT_INODE = (
    _HEADER.size + offset for offset in (1, 2, 4, 6, 68)
)

_BUFFER = 1 << 16
"""Larger than any message of the kernel in a dump (32 KiB)."""
_ATTEMPTS = 3


class MalformedReply(ValueError):
    """The kernel's answer is not a valid reply to a dump of TCP sockets."""


class Interrupted(Exception):
    """The table changed during the dump, or replies were lost: the dump is incomplete."""


class SocketEnd(NamedTuple):
    """One end of a connection."""

    address: bytes
    """Packed, 4 or 16 bytes; never IPv4 mapped to IPv6."""
    port: int


class OneSocket(NamedTuple):
    """The socket that a connection has at one end."""

    state: int
    """As in `TcpState`."""
    uid: int
    """The user of the process that made the socket; means nothing without an inode."""
    inode: int
    """0 if no process holds the socket: it is not accepted yet, or closed."""


class Table:
    """Sockets as columns; each property has one value per socket, in the same order."""

    __slots__ = ("_chunks", "_number")

    def __init__(self, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Keep records as `parse` returns them: chunks, each with its stride in bytes."""
        self._chunks = [(chunk, stride) for chunk, stride in chunks if chunk]
        self._number = sum(len(chunk) // stride for chunk, stride in self._chunks)

    def __len__(self) -> int:
        return self._number

    @property
    def states(self) -> bytes:
        """States of the netlink records, as numbers of `TcpState`."""
        return self._column(_AT_STATE)

    @property
    def timers(self) -> bytes:
        """Timers of the netlink records; `TIME_WAIT_TIMER` is the one of interest."""
        return self._column(_AT_TIMER)

    @property
    def source_ports(self) -> array[int]:
        """Local ports of the netlink records."""
        return self._integers("H", (_AT_SOURCE + 1, _AT_SOURCE))

    @property
    def destination_ports(self) -> array[int]:
        """Remote ports of the netlink records; 0 for a listener."""
        return self._integers("H", (_AT_DESTINATION + 1, _AT_DESTINATION))

    @property
    def inodes(self) -> array[int]:
        """Inodes of the netlink records, as in `/proc/<pid>/fd`; 0 if no process has the socket."""
        at = range(_AT_INODE, _AT_INODE + 4)
        return self._integers("I", at if sys.byteorder == "little" else at[::-1])

    def _column(self, at: int) -> bytes:
        return b"".join([chunk[at::stride] for chunk, stride in self._chunks])

    def _integers(self, code: str, least_significant_first: Sequence[int]) -> array[int]:
        """Assemble integers from columns of netlink bytes, without a loop over sockets."""
        size = len(least_significant_first)
        native = bytearray(size * self._number)
        for place, at in enumerate(least_significant_first):
            native[place if sys.byteorder == "little" else size - 1 - place :: size] = self._column(
                at
            )
        return array(code, bytes(native))


def record(state: int, timer: int, source: int, destination: int, inode: int) -> bytes:
    """Return one TCP socket as a netlink record, for a `Table` made from another source."""
    ports = socket.htons(source), socket.htons(destination)
    return _HEADER.pack(RECORD, _TCPDIAG_GETSOCK, 0, 0, 0) + _SOCKET.pack(
        0, state, timer, 0, *ports, 0, 0, 0, inode
    )


def request(states: int, ports: tuple[int, int] | None, sequence: int) -> bytes:
    """Return the netlink request for all sockets in `states` (a sum of `TcpState.mask`).

    With `ports`, only for those with a source port from first to last.
    """
    body = _REQUEST.pack(0, 0, 0, 0, states, 0)
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


def lookup(own: SocketEnd, other: SocketEnd) -> OneSocket | None:
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
        records, _, _ = parse(_datagram(diag), sequence)
    if len(records) < RECORD:
        message = "no socket"
        raise MalformedReply(message)
    _, state, _, _, source, destination, _, _, uid, inode = _SOCKET.unpack_from(
        records, _HEADER.size
    )
    same = (socket.ntohs(source), socket.ntohs(destination)) == (own.port, other.port)
    return OneSocket(state, uid, inode) if same else None  # else it is a listener


def parse(buffer: bytes, sequence: int) -> tuple[bytes, int, bool]:
    """Return the records of one netlink datagram of the reply to `sequence`, their stride in bytes,
    and whether the reply ends with it.

    Raises OSError for a refusal, Interrupted, MalformedReply.
    """
    records: list[bytes] = []
    position, end = 0, len(buffer)
    while position < end:
        if end - position < _HEADER.size:
            message = f"{end - position} bytes after the last message"
            raise MalformedReply(message)
        length, kind, flags, answered, _ = header = _HEADER.unpack_from(buffer, position)
        if length < _HEADER.size or length > end - position:
            message = f"a message of {length} bytes, where {end - position} are left"
            raise MalformedReply(message)
        if answered != sequence:
            message = f"a reply to request {answered} instead of {sequence}"
            raise MalformedReply(message)
        if flags & _DUMP_INTERRUPTED:
            message = "the socket table changed during the dump"
            raise Interrupted(message)
        if kind == _TCPDIAG_GETSOCK:
            if length < RECORD:
                message = f"a socket of {length} bytes"
                raise MalformedReply(message)
            if position == 0 and _uniform(buffer, length, _HEADER.pack(*header)):
                return buffer, length, False
            records.append(buffer[position : position + RECORD])
        elif kind == _DONE:
            _refusal(buffer, position, length)
            return b"".join(records), RECORD, True
        elif kind == _ERROR:
            _refusal(buffer, position, length)
            message = "an unexpected acknowledgment"
            raise MalformedReply(message)
        elif kind == _OVERRUN:
            message = "replies were lost"
            raise Interrupted(message)
        elif kind != _NOOP:
            message = f"a message of type {kind}"
            raise MalformedReply(message)
        position += (length + 3) & ~3
    return b"".join(records), RECORD, False


def _uniform(buffer: bytes, length: int, header: bytes) -> bool:
    """Return whether the netlink datagram holds only sockets with this header, as in large dumps,
    so that it can be used whole.
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
        message = f"a result of {length} bytes"
        raise MalformedReply(message)
    (code,) = _INT.unpack_from(buffer, position + _HEADER.size)
    if code < 0:
        number = -code
        raise OSError(number, f"netlink: {os.strerror(number)}")


_sequences = itertools.count(1)


def dump(
    states: int,
    ports: tuple[int, int] | None,
    budget: float,
    cpu_time: Callable[[], float] = time.thread_time,
) -> Table:
    """Return the sockets of this network namespace, from the kernel over netlink.

    Arguments as for `request`; `budget` is in seconds of this thread's CPU time. A dump never
    waits, so wall time beyond that is a node that has no CPU for the agent, not a slow dump.

    Raises OSError, including TimeoutError; Interrupted if the dump was incomplete in three
    attempts; MalformedReply.
    """
    end = cpu_time() + budget
    return whole(lambda: _dump(states, ports, end, cpu_time))


def whole(attempt: Callable[[], Table]) -> Table:
    """Return the result of a netlink dump; retry an interrupted one, three attempts in all."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(Interrupted):
            return attempt()
    return attempt()


def _dump(
    states: int, ports: tuple[int, int] | None, end: float, cpu_time: Callable[[], float]
) -> Table:
    sequence = next(_sequences) & 0xFFFFFFFF
    # The kernel makes the first datagram during the send and each further one during a receive, so
    # there is never anything to wait for.
    with _diag() as diag:
        diag.sendto(request(states, ports, sequence), (0, 0))
        return Table(receive(lambda: _datagram(diag), sequence, end, cpu_time))


def _diag() -> socket.socket:
    return socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _SOCK_DIAG
    )


def receive(
    datagram: Callable[[], bytes], sequence: int, end: float, cpu_time: Callable[[], float]
) -> Iterator[tuple[bytes, int]]:
    """Yield the records of all datagrams of a netlink reply.

    Raises as `parse`, and TimeoutError once `cpu_time` is past `end`.
    """
    done = False
    while not done:
        if cpu_time() > end:
            message = "the dump of TCP sockets takes too much CPU time"
            raise TimeoutError(errno.ETIMEDOUT, message)
        records, stride, done = parse(datagram(), sequence)
        yield records, stride


def _datagram(diag: socket.socket) -> bytes:
    while True:
        try:
            data, _, flags, (sender, _) = diag.recvmsg(_BUFFER)
        except BlockingIOError as error:
            message = "no answer to the dump of TCP sockets"
            raise TimeoutError(errno.ETIMEDOUT, message) from error
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                message = "replies were lost"
                raise Interrupted(message) from error
            raise
        if flags & socket.MSG_TRUNC or not data:
            message = "a datagram that is cut off or empty"
            raise MalformedReply(message)
        if sender == 0:  # ignore messages of other processes
            return data
