"""One client's HTTP connection, with a timeout for each of its steps."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from aiohttp.web_protocol import RequestHandler
from aiohttp.web_response import Response, StreamResponse

from dshealthd.core import timing
from dshealthd.core.garbage import free_frames, free_transport
from dshealthd.core.sockets import reset_on_close
from dshealthd.http.connection_limiter import CloseReason, ConnectionLimiter

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest
    from aiohttp.web_server import Server

    from dshealthd.http.tls import Tls

log = logging.getLogger(__name__)

IDLE_TIMEOUT = 75.0
"""Seconds for which a connection is kept open between requests.

Longer than a usual scrape interval.
"""
RESPONSE_PATIENCE = 6
"""Timeout from a request's headers until its body has arrived and its answer is sent.

A multiple of the header timeout; 30 s by default.
"""
MAX_LINE, MAX_FIELD, MAX_FIELDS = 4096, 8190, 64
"""Most bytes of a request line and of a header field; most header fields."""


class Connection(asyncio.Protocol):
    """One client's connection, with a timeout for each of its steps.

    aiohttp reads its requests, from the first byte on: its part takes more than half of the memory,
    and a crowd that connects and says nothing must not make the agent grow.
    """

    def __init__(
        self,
        manager: Server,
        gate: ConnectionLimiter,
        client: str,
        *,
        header_timeout: float,
        answered: Callable[[BaseRequest, StreamResponse], None],
    ) -> None:
        """Handle a connection of `client` that the gate has admitted.

        `answered` is called with every answer before it is sent.
        """
        self._loop = asyncio.get_running_loop()
        self._manager = manager
        self._gate = gate
        self._client: str | None = client
        self._header_timeout = header_timeout
        self.tls: Tls | None = None
        """The connection's TLS; the listener sets it before `connection_made`."""
        self.opening: asyncio.Task[None] | None = None
        """The listener's task that leads to `connection_made`; None after that."""
        self.answered = answered
        self._evicted = False
        self._idle = True
        self.transport: asyncio.Transport | None = None
        """The transport, until the connection is lost."""
        self._requests: Requests | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until, self._otherwise = 0.0, CloseReason.HEADERS
        """When the present step must have ended, and what it is otherwise closed for."""
        gate.awaits(client, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout for the first request's headers."""
        self.opening = None
        self.transport = cast("asyncio.Transport", transport)
        if self._client is None:
            return  # already evicted; its cancelled task closes it
        if self.tls is not None and not self.tls.permits(transport.get_extra_info("peercert")):
            self._gate.refused[CloseReason.CERTIFICATE] += 1
            self.release()
            _abort(transport)
            return
        self._allow(self._header_timeout, CloseReason.HEADERS)

    def data_received(self, data: bytes) -> None:
        """Start the timeout for a request's headers at their first byte.

        Bytes that trickle in later do not extend it.
        """
        if self._client is None or self.transport is None:
            return  # evicted, or refused for its certificate
        # Only at the first byte: an idle connection may wait much longer for its next request.
        if data and self._idle and self._timer is None:
            self._gate.awaits(self._client, self)
            self._allow(self._header_timeout, CloseReason.HEADERS)
        if self._requests is None:
            self._requests = Requests(self._manager, self)
            self._requests.connection_made(self.transport)
        self._requests.data_received(data)

    def pause_writing(self) -> None:
        """Stop writing to the HTTP client, as it reads more slowly."""
        if self._requests is not None:
            self._requests.pause_writing()

    def resume_writing(self) -> None:
        """Resume writing to the HTTP client."""
        if self._requests is not None:
            self._requests.resume_writing()

    def begin(self) -> None:
        """Record that a request's headers are complete and its handling starts."""
        self._idle = False
        if self._client is not None:
            self._gate.answers(self._client, self)
        self._allow(RESPONSE_PATIENCE * self._header_timeout, CloseReason.RESPONSE)

    def rest(self) -> None:
        """Record that an answer was sent: the connection is idle."""
        self._idle = True
        self._stop_timer()
        if self._client is not None:
            self._gate.rest(self._client, self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Return the lost connection's place to the connection limiter."""
        self._closed()
        self.release()
        if self._requests is not None:
            self._requests.connection_lost(exc)
            self._requests = None
        if self.transport is not None:
            free_transport(self.transport)
            self.transport = None

    def release(self) -> None:
        """Return the connection's place to the connection limiter, once."""
        self._stop_timer()
        if self._client is not None:
            self._gate.leave(self._client, self)
            self._client = None

    def evict(self) -> None:
        """Close the connection whatever it is doing, and return its place."""
        self.release()
        self._evicted = True
        if self.opening is not None:
            self.opening.add_done_callback(self._closed)
            # Only once the task has begun: a task cancelled earlier would leave the socket open.
            self._loop.call_soon(self.opening.cancel)
        elif self.transport is not None:
            _abort(self.transport)

    def _closed(self, _task: object = None) -> None:
        if self._evicted:
            self._evicted = False
            self._gate.closing -= 1

    def _allow(self, seconds: float, otherwise: CloseReason) -> None:
        self._until, self._otherwise = self._loop.time() + seconds, otherwise
        # One timer serves both steps of a request, as nearly all end before it is due.
        if self._timer is None or self._timer.when() > self._until:
            self._stop_timer()
            self._timer = self._loop.call_at(self._until, self._time_is_up)

    def _time_is_up(self, *, again: bool = False) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._time_is_up)
        elif again:
            self._expire()
        else:
            # First read what has arrived in time: it may have been the agent that was stopped.
            self._timer = self._loop.call_later(
                timing.MOMENT, functools.partial(self._time_is_up, again=True)
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.transport is not None:
            self._gate.refused[self._otherwise] += 1
            _abort(self.transport)


class Requests(RequestHandler):
    """aiohttp's part of a connection: it reads the requests, and sends their answers."""

    def __init__(self, manager: Server, connection: Connection) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_TIMEOUT,
            lingering_time=0,
            auto_decompress=False,
            max_line_size=MAX_LINE,
            max_field_size=MAX_FIELD,
            max_headers=MAX_FIELDS,
            logger=log,
            access_log=None,  # type: ignore[arg-type] # aiohttp's own way to have none
        )
        self.connection = connection

    async def finish_response(
        self, request: BaseRequest, resp: StreamResponse, start_time: float | None
    ) -> tuple[StreamResponse, bool]:
        """Send an answer; afterwards the connection is idle."""
        resp.headers.setdefault("Server", "dshealthd")
        self.connection.answered(request, resp)
        done = await super().finish_response(request, resp, start_time)
        self.connection.rest()
        return done

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Answer an invalid HTTP request without logging it.

        Only our own defects are logged with a traceback.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error(
                "answering %s failed; this is a defect of dshealthd", request.path, exc_info=exc
            )
        else:
            log.debug("refused a request from %s: %s", request.remote, message)
            if exc is not None:
                free_frames(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("response headers already sent")
        response = plain_answer(HTTPStatus(status))
        response.force_close()
        return response


def connection_of(request: BaseRequest) -> Connection:
    """Return the connection that a request came by."""
    return cast("Requests", request.protocol).connection


def _abort(transport: asyncio.BaseTransport) -> None:
    """Close an HTTP connection at once, even with unsent data.

    A client that reads nothing must not keep it open.
    """
    # One of TLS has lost its socket a turn of the loop before its protocol learns of it.
    connection = transport.get_extra_info("socket")
    if connection is not None:
        reset_on_close(connection)
    if isinstance(transport, asyncio.Transport):
        transport.abort()


def plain_answer(status: HTTPStatus, text: str = "", **headers: str) -> Response:
    """Return an HTTP answer of one line of text."""
    return Response(
        status=status,
        body=f"{text or status.phrase}\n".encode(),
        headers={"Content-Type": "text/plain; charset=utf-8", "Server": "dshealthd", **headers},
    )
