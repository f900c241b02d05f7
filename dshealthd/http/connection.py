"""One client's HTTP connection, and how long each of its steps may take."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp.web_protocol import RequestHandler
from aiohttp.web_response import Response

from dshealthd.core import deadline
from dshealthd.http.connection_limiter import CloseReason, reset_on_close

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.web_request import BaseRequest
    from aiohttp.web_response import StreamResponse
    from aiohttp.web_server import Server

    from dshealthd.http.connection_limiter import ConnectionLimiter
    from dshealthd.http.tls import Tls

log = logging.getLogger(__name__)

IDLE_TIMEOUT = 75.0
"""Seconds for which a connection is kept between two requests.

Longer than a usual scrape interval.
"""
RESPONSE_PATIENCE = 6
"""From a request's headers until its body has come and its answer has gone.

So many times what headers get, 30 s by default.
"""
MAX_LINE, MAX_FIELD, MAX_FIELDS = 4096, 8190, 64
"""Bytes of a request line and of a header field; number of header fields."""


class Connection(RequestHandler):
    """One client's connection.

    aiohttp bounds the time between requests; this bounds headers, bodies and answers too.
    """

    __slots__ = (
        "_answered",
        "_client",
        "_evicted",
        "_gate",
        "_header_timeout",
        "_idle",
        "_timer",
        "opening",
        "tls",
    )

    def __init__(
        self,
        manager: Server,
        gate: ConnectionLimiter,
        client: str,
        *,
        header_timeout: float,
        answered: Callable[[BaseRequest, StreamResponse], None],
    ) -> None:
        """Take the place of `client` in the gate.

        `answered` is told of every answer, before it goes out.
        """
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
        self._gate = gate
        self._client: str | None = client
        self._header_timeout = header_timeout
        self.tls: Tls | None = None
        """What protects it; the listener sets it before `connection_made`."""
        self.opening: asyncio.Task[None] | None = None
        """The listener's task that leads to `connection_made`, until then."""
        self._answered = answered
        self._evicted = False
        self._idle = True
        self._timer: asyncio.TimerHandle | None = None
        gate.awaits(client, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start with the time for the first request's headers running."""
        self.opening = None
        if self._client is None:
            return  # it was evicted before; its task, cancelled, closes it
        if self.tls is not None and not self.tls.permits(transport.get_extra_info("peercert")):
            self._gate.refused[CloseReason.CERTIFICATE] += 1
            _abort(transport)
            return
        super().connection_made(transport)
        self._allow(self._header_timeout, CloseReason.HEADERS)

    def data_received(self, data: bytes) -> None:
        """Let the time for a request's headers run from their first byte.

        What trickles in later does not stretch it.
        """
        # Only from the first byte: an idle connection may wait for its next request much longer.
        if data and self._idle and self._timer is None and self._client is not None:
            self._gate.awaits(self._client, self)
            self._allow(self._header_timeout, CloseReason.HEADERS)
        super().data_received(data)

    def begin(self) -> None:
        """Note that an HTTP request's headers are complete and its handling starts."""
        self._idle = False
        if self._client is not None:
            self._gate.answers(self._client, self)
        self._allow(RESPONSE_PATIENCE * self._header_timeout, CloseReason.RESPONSE)

    async def finish_response(
        self, request: BaseRequest, resp: StreamResponse, start_time: float | None
    ) -> tuple[StreamResponse, bool]:
        """Send an HTTP answer; afterwards the connection is idle."""
        resp.headers.setdefault("Server", "dshealthd")
        self._answered(request, resp)
        done = await super().finish_response(request, resp, start_time)
        self._idle = True
        self._stop_timer()
        if self._client is not None:
            self._gate.rest(self._client, self)
        return done

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Answer an HTTP request that is none, without a word about it in the log.

        Only a defect of ours gets a traceback there.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error(
                "answering %s failed; this is a defect of dshealthd", request.path, exc_info=exc
            )
        else:
            log.debug("refused a request from %s: %s", request.remote, message)
        if request.writer.output_size > 0:
            problem = "the answer has begun"
            raise ConnectionError(problem)
        response = plain(HTTPStatus(status))
        response.force_close()
        return response

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the HTTP connection's place in the gate back."""
        self._closed()
        self.release()
        super().connection_lost(exc)

    def release(self) -> None:
        """Give the HTTP connection's place in the gate back, if that has not been done."""
        self._stop_timer()
        if self._client is not None:
            self._gate.leave(self._client, self)
            self._client = None

    def evict(self) -> None:
        """Close the HTTP connection in the middle of whatever it is at, and give its place back."""
        self.release()
        self._evicted = True
        if self.opening is not None:
            self.opening.add_done_callback(self._closed)
            # After the task has begun: one that has not would leave the socket open.
            self._loop.call_soon(self.opening.cancel)
        elif self.transport is not None:
            _abort(self.transport)

    def _closed(self, _task: object = None) -> None:
        if self._evicted:
            self._evicted = False
            self._gate.closing -= 1

    def _allow(self, seconds: float, otherwise: CloseReason) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._time_is_up, otherwise)

    def _time_is_up(self, otherwise: CloseReason) -> None:
        # What had arrived by then is read first: it may have been the agent that was stopped.
        self._timer = self._loop.call_later(deadline.MOMENT, self._expire, otherwise)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, refusal: CloseReason) -> None:
        self._timer = None
        if self.transport is not None:
            self._gate.refused[refusal] += 1
            _abort(self.transport)


def _abort(transport: asyncio.BaseTransport) -> None:
    """Close an HTTP connection at once, whatever is still unsent.

    A client that reads nothing must not keep it.
    """
    reset_on_close(transport.get_extra_info("socket"))
    if isinstance(transport, asyncio.Transport):
        transport.abort()


def plain(status: HTTPStatus, text: str = "", **headers: str) -> Response:
    """Return an HTTP answer of one line of text."""
    return Response(
        status=status,
        body=f"{text or status.phrase}\n".encode(),
        headers={"Content-Type": "text/plain; charset=utf-8", "Server": "dshealthd", **headers},
    )
