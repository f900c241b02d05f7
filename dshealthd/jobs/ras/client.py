"""The client of NCCL's RAS: one query to each of several jobs at once, bounded in time and bytes.

The kernel accepts connections for a stopped process, which then says nothing. NCCL's processes
share the port, and the kernel picks one for each connection. So a greeting without an answer is
retried on a new connection, as NCCL's own client does.
"""

from __future__ import annotations

import errno
import selectors
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import Reason
from dshealthd.core.result import os_reason
from dshealthd.jobs.ras.address import Endpoint
from dshealthd.jobs.ras.protocol import (
    MAY_BE_SENT,
    OPENING,
    Conversation,
    NoListener,
    Stranger,
    Unanswered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ATTEMPTS = 6
"""Most connections made until one greets."""
GREETING = 1.0
"""Seconds within which a healthy process greets."""
_NOBODY = frozenset(
    {errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EAFNOSUPPORT}
)
_CHUNK = 1 << 18
_LOW_WATER = 1 << 16
"""Bytes that the kernel collects before it wakes the reader of an answer, so that a trickling one
costs nothing.
"""


@dataclass(slots=True)
class _Connection:
    """One connection attempt."""

    socket: socket.socket
    endpoint: Endpoint
    conversation: Conversation
    patience: float
    """Deadline of the greeting, by the monotonic clock."""
    made: bool = False


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
        self._vouch = verify_peer
        self._end = 0.0
        self._connection: _Connection | None = None

    @property
    def due(self) -> float:
        """When to check this query even if nothing arrives, by the monotonic clock."""
        connection = self._connection
        return (
            self._end
            if connection is None or connection.conversation.greeted
            else min(self._end, connection.patience)
        )

    def start(self, selector: selectors.BaseSelector, now: float, end: float) -> None:
        """Make the first connection; the answer must be complete at `end`."""
        self._selector, self._end = selector, end
        self._connect(now)

    def give_up_if_late(self, now: float) -> None:
        """Give up the query, or its current connection, if it has taken too long."""
        if now >= self._end:
            self._finish(Unanswered(Reason.TIMEOUT, "no complete answer in time"))
        elif now >= self.due:
            self._again(
                now,
                Unanswered(
                    Reason.TIMEOUT, f"no greeting within {GREETING:g} s: the process may be stopped"
                ),
            )

    def ready(self, now: float) -> None:
        """Continue the query after the connection was made or data has arrived."""
        if (connection := self._connection) is None:
            return
        try:
            self._go_on(connection, now)
        except BlockingIOError:
            return
        except ConnectionRefusedError:
            self._nobody(connection.endpoint, now)
        except (OSError, Unanswered) as error:
            failure = (
                error if isinstance(error, Unanswered) else Unanswered(os_reason(error), str(error))
            )
            if connection.conversation.greeted:
                self._finish(failure)
            else:
                self._again(now, failure)

    def _go_on(self, connection: _Connection, now: float) -> None:
        if not connection.made:
            connection.made = True
            self._say(connection, OPENING)  # raises why the connection could not be made
            return
        data = connection.socket.recv(_CHUNK)
        if not data:
            self._finish(connection.conversation.end())
            return
        fresh = not connection.conversation.greeted
        reply = connection.conversation.receive(data, self._end - now)
        # Not before the greeting: until a process has accepted, none owns the other end.
        if fresh and connection.conversation.greeted and not self._vouch(connection.socket):
            self._again(now, Stranger("a process outside the job listens at its address"))
        elif reply:
            self._say(connection, reply)

    def _say(self, connection: _Connection, line: bytes) -> None:
        """Send a line, which must be in `MAY_BE_SENT`.

        The socket always takes it whole, because its buffer is empty.
        """
        if line not in MAY_BE_SENT:
            raise Unanswered(Reason.INTERNAL, f"{line!r} is not one of the lines that may be sent")
        connection.socket.send(line)
        if connection.conversation.answering:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LOW_WATER)
        self._selector.modify(connection.socket, selectors.EVENT_READ, self)

    def _connect(self, now: float) -> None:
        endpoint = self._endpoints[self.connections % len(self._endpoints)]
        self.connections += 1
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        try:
            made = socket.socket(
                family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            )
            self._connection = _Connection(made, endpoint, Conversation(), now + GREETING)
            self._selector.register(made, selectors.EVENT_WRITE, self)
            made.connect((endpoint.host, endpoint.port))
        except BlockingIOError:
            return  # under way
        except OSError as error:
            if error.errno in _NOBODY:
                self._nobody(endpoint, now)
            else:
                self._finish(Unanswered(os_reason(error), str(error)))

    def _nobody(self, endpoint: Endpoint, now: float) -> None:
        """Drop an address at which no RAS listens, and try the next."""
        self._close()
        self._endpoints.remove(endpoint)
        if self._endpoints:
            self._connect(now)
        else:
            self._finish(NoListener("NCCL RAS is not reachable"))

    def _again(self, now: float, failure: Unanswered | Stranger) -> None:
        self._close()
        if self.connections < ATTEMPTS:
            self._connect(now)
        else:
            self._finish(failure)

    def _finish(self, outcome: bytes | Unanswered | NoListener | Stranger) -> None:
        self.outcome = outcome
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection.socket)
            self._connection.socket.close()
            self._connection = None


def send_queries(queries: Iterable[Query], seconds: float, monotonic: Callable[[], float]) -> None:
    """Run all queries, and return when each has its outcome, at the latest after `seconds`."""
    now = monotonic()
    with selectors.DefaultSelector() as selector:
        asked = list(queries)
        for query in asked:
            query.start(selector, now, now + seconds)
        while waiting := [query for query in asked if query.outcome is None]:
            now = monotonic()
            for query in waiting:
                query.give_up_if_late(now)
            waiting = [query for query in waiting if query.outcome is None]
            if not waiting:
                break
            for key, _ in selector.select(max(0.0, min(query.due for query in waiting) - now)):
                key.data.ready(monotonic())
