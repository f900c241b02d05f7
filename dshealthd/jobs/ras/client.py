"""The client of NCCL's RAS: one query to each of several jobs at once, bounded in time and bytes.

The kernel accepts connections for a stopped process, which then says nothing. NCCL's processes
share the port, and the kernel picks one for each connection. So a greeting without an answer is
retried on a new connection, as NCCL's own client does.
"""

from __future__ import annotations

import contextlib
import errno
import re
import select
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from dshealthd.core.collector import Reason
from dshealthd.core.result import os_reason
from dshealthd.jobs.ras import protocol
from dshealthd.jobs.ras.protocol import NoListener, Stranger, Unanswered

if TYPE_CHECKING:
    from dshealthd.jobs.ras.address import Endpoint

ATTEMPTS = 6
"""Most connections made until one greets."""
GREETING = 1.0
"""Seconds within which a healthy process greets."""
_NOBODY = frozenset(
    {errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EAFNOSUPPORT}
)
_CLOSED = "the connection was closed at {}, without an answer"
_CHUNK = 1 << 18
_LOW_WATER = 1 << 16
"""Bytes that the kernel collects before it wakes the reader of an answer, so that a trickling one
costs nothing.
"""
Wait: TypeAlias = tuple[socket.socket, int, float]
"""A connection, the events of poll(2) that its query waits for, and the monotonic time after which
TimeoutError is thrown into it.
"""


class Query:
    """One query, over as many connections as it takes; `outcome` is set at the end."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        verify_peer: Callable[[socket.socket], bool],
    ) -> None:
        """Prepare to query.

        `verify_peer` returns whether the other end of a connection may answer, or raises OSError.
        """
        self.outcome: bytes | Unanswered | NoListener | Stranger | None = None
        self.connections = 0
        self.responder: int | None = None
        """Pid of the process that answers, if `verify_peer` sets it."""
        self._endpoints = list(endpoints)
        self._verify_peer = verify_peer
        self._greeted = False
        """Whether the other end of the last connection speaks the protocol of RAS."""

    def run(self, end: float, monotonic: Callable[[], float]) -> Generator[Wait, None, None]:
        """Yield what to wait for, until the query has its outcome, at `end` at the latest."""
        try:
            self.outcome = yield from self._connect(end, monotonic)
        except (NoListener, Stranger, Unanswered) as outcome:
            self.outcome = outcome

    def _connect(self, end: float, monotonic: Callable[[], float]) -> Generator[Wait, None, bytes]:
        """Connect until a process answers, and return its answer."""
        while self._endpoints:
            endpoint = self._endpoints[self.connections % len(self._endpoints)]
            family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            self.connections += 1
            self._greeted = False
            is_last = self.connections >= ATTEMPTS
            try:
                with socket.socket(family, kind) as connection:
                    return (yield from self._converse(connection, endpoint, end, monotonic))
            except TimeoutError as error:
                if monotonic() >= end:
                    raise Unanswered(Reason.TIMEOUT, "no complete answer in time") from error
                if is_last:
                    detail = f"no greeting within {GREETING:g} s: the process may be stopped"
                    raise Unanswered(Reason.TIMEOUT, detail) from error
            except OSError as error:
                if error.errno in _NOBODY:
                    self._endpoints.remove(endpoint)
                elif is_last or self._greeted:
                    raise Unanswered(os_reason(error), str(error)) from error
            except Unanswered:
                if is_last or self._greeted:
                    raise
            except Stranger:
                if is_last:
                    raise
        raise NoListener("NCCL RAS is not reachable")

    def _converse(
        self,
        connection: socket.socket,
        endpoint: Endpoint,
        end: float,
        monotonic: Callable[[], float],
    ) -> Generator[Wait, None, bytes]:
        """Query the process at an endpoint, and return its answer in JSON, complete as far as the
        protocol shows. Raises OSError, Stranger, Unanswered.
        """
        patience = min(end, monotonic() + GREETING)
        with contextlib.suppress(BlockingIOError):  # under way
            connection.connect((endpoint.host, endpoint.port))
        yield connection, select.POLLOUT, patience
        _say(connection, protocol.OPENING)  # raises why the connection could not be made
        # Any version: RAS reports an error for what it does not know.
        yield from _reply(connection, "greeting", rb"SERVER PROTOCOL .*", patience)
        self._greeted = True
        # Not before the greeting: until a process has accepted, none owns the other end.
        if not self._verify_peer(connection):
            raise Stranger("a process outside the job listens at its address")
        seconds = int(end - monotonic()) - protocol.GRACE
        _say(connection, b"TIMEOUT %d\n" % max(1, min(protocol.COLLECTION, seconds)))
        yield from _reply(connection, "timeout", rb"OK", end)
        _say(connection, protocol.JSON)
        reply = yield from _reply(connection, "format", rb"OK|ERROR.*", end)
        if reply != b"OK":
            # A text answer of this release may crash the job: nothing more is sent.
            raise Unanswered(Reason.MALFORMED, "JSON was refused, and text is not requested")
        _say(connection, protocol.STATUS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LOW_WATER)
        answer = bytearray()
        while data := (yield from _receive(connection, end)):
            answer += data
            if len(answer) > protocol.MAX_ANSWER:
                detail = f"the answer is longer than {protocol.MAX_ANSWER} bytes"
                raise Unanswered(Reason.MALFORMED, detail)
        if not answer:
            raise Unanswered(Reason.MALFORMED, _CLOSED.format("status"))
        return bytes(answer)


def _say(connection: socket.socket, line: bytes) -> None:
    """Send a line, which must be in `MAY_BE_SENT`.

    The socket always takes it whole, because its buffer is empty.
    """
    if line not in protocol.MAY_BE_SENT:
        raise Unanswered(Reason.INTERNAL, f"{line!r} is not one of the lines that may be sent")
    connection.send(line)


def _receive(connection: socket.socket, until: float) -> Generator[Wait, None, bytes]:
    """Return what arrives; nothing once the other end has closed."""
    while True:
        yield connection, select.POLLIN, until
        with contextlib.suppress(BlockingIOError):
            return connection.recv(_CHUNK)


def _reply(
    connection: socket.socket, step: str, expected: bytes, until: float
) -> Generator[Wait, None, bytes]:
    """Return a reply, in capitals: one line that matches `expected`. Raises Unanswered."""
    line = b""
    while b"\n" not in line and len(line) <= protocol.MAX_LINE:
        data = yield from _receive(connection, until)
        if not data:
            raise Unanswered(Reason.MALFORMED, _CLOSED.format(step))
        line += data
    if line.find(b"\n") != len(line) - 1 or len(line) > protocol.MAX_LINE + 1:
        raise Unanswered(Reason.MALFORMED, f"more than the expected line: {line[:80]!r}")
    line = line.strip().upper()
    if not re.fullmatch(expected, line):
        raise Unanswered(Reason.MALFORMED, f"not a reply to {step}: {line[:80]!r}")
    return line


def send_queries(queries: Iterable[Query], seconds: float, monotonic: Callable[[], float]) -> None:
    """Run all queries, and return when each has its outcome, at the latest after `seconds`."""
    end = monotonic() + seconds
    waits: dict[Generator[Wait, None, None], Wait] = {}

    def advance(run: Generator[Wait, None, None], *, late: bool = False) -> None:
        try:
            waits[run] = run.throw(TimeoutError()) if late else next(run)
        except StopIteration:
            waits.pop(run, None)

    for query in queries:
        advance(query.run(end, monotonic))
    while waits:
        poll = select.poll()
        for connection, events, _ in waits.values():
            poll.register(connection, events)
        first = min(until for *_, until in waits.values())
        ready = dict(poll.poll(1000 * max(0.0, first - monotonic())))
        now = monotonic()
        for run, (connection, _, until) in list(waits.items()):
            if now >= until:
                advance(run, late=True)
            elif connection.fileno() in ready:
                advance(run)
