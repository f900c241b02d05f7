"""The peer listener: authenticates other nodes' calls, checks them and passes them to handlers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from aiohttp.web_response import Response

from dshealthd.core import documents, schema
from dshealthd.core.collector import counter, gauge
from dshealthd.core.schema import SchemaError
from dshealthd.core.sockets import listen_address
from dshealthd.core.timing import time_limit
from dshealthd.http.connection import connection_of
from dshealthd.http.listener import Listener
from dshealthd.http.tls import Tls
from dshealthd.probe.peers.connection import PeerConnection, PeerGate
from dshealthd.probe.peers.credentials import Credentials
from dshealthd.probe.peers.guard import Call, Guard, RequestRejected
from dshealthd.probe.peers.messages import METHODS, Method
from dshealthd.probe.peers.protocol import (
    ANSWER,
    MAX_BODY,
    NONCE,
    PREFIX,
    TIMED_OUT,
    UNAUTHORIZED,
    UNTOLD,
    Refusal,
    Rejection,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from aiohttp.web_request import BaseRequest
    from aiohttp.web_response import StreamResponse

    from dshealthd.core.collector import Sample
    from dshealthd.probe.options import PeerOptions
    from dshealthd.probe.peers.resolver import Resolver

    Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

log = logging.getLogger(__name__)

OPEN = gauge(
    "dshealthd_probe_peer_connections",
    "Open connections to the peer listener from other nodes or strangers.",
)
CLOSED = counter(
    "dshealthd_probe_peer_connections_refused_total",
    "Connections that the peer listener closed because of a limit; replaced: an unauthenticated "
    "one made room for a newer one.",
    "reason",
)
REQUESTS = counter(
    "dshealthd_probe_peer_requests_total",
    "Authenticated calls of other nodes, by result.",
    "method",
    "result",
)
REFUSED = counter(
    "dshealthd_probe_peer_requests_refused_total",
    "Requests that the peer listener refused before any handler: unauthenticated, malformed or "
    "over a limit.",
    "reason",
)

HANDLER_TIMEOUT = 25.0
"""Seconds that a handler may take; a little less than the connection allows."""


_CODES = {
    Rejection.STALE: HTTPStatus.UNAUTHORIZED,
    Rejection.RATE: HTTPStatus.TOO_MANY_REQUESTS,
    Rejection.METHOD: HTTPStatus.NOT_FOUND,
    Rejection.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Rejection.MALFORMED: HTTPStatus.BAD_REQUEST,
    Rejection.SLOW: HTTPStatus.REQUEST_TIMEOUT,
}


class PeerServer:
    """Serves the peer API."""

    def __init__(
        self,
        options: PeerOptions,
        me: str,
        members: Callable[[], Collection[str]],
        handlers: Mapping[str, Handler],
        *,
        credentials: Credentials | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        resolver: Resolver | None = None,
    ) -> None:
        """Prepare to serve `handlers` as the node `me`. Raises CredentialError.

        A handler gets the sender's name and its message as Python values, and may raise `Refusal`.

        `credentials` are shared with the client, if there is one; otherwise they are read here.
        `resolver`, if given, gives the addresses from which each member may call.
        """
        self._options = options
        self._handlers = {
            PREFIX + name: (name, handler, METHODS[name]) for name, handler in handlers.items()
        }
        self._credentials = credentials or Credentials(options)
        self._guard = Guard(options, me, members, self._credentials, monotonic, resolver)
        self._gate = PeerGate(options.max_connections, options.max_connections_per_address)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._listener = Listener(
            self._gate,
            self._handle,
            self._answered,
            header_timeout=options.header_timeout,
            max_body=MAX_BODY,
            tls=self._tls if options.tls else None,
            connection=PeerConnection,
        )

    @property
    def port(self) -> int:
        """The port of the peer listener."""
        return self._listener.port

    async def start(self) -> None:
        """Listen for peers, if an address is configured. Raises OSError if that fails."""
        if not self._options.listen_address:
            return
        if not self._options.tls and self._options.key_file is None:
            message = "the peer listener needs a key or certificates"
            raise ValueError(message)
        await self._listener.start(*listen_address(self._options.listen_address))

    async def close(self) -> None:
        """Stop listening for peers and close the connections; answers in progress get a second."""
        await self._listener.close()
        await self._credentials.close()

    def samples(self) -> Iterator[Sample]:
        """Yield the peer listener's own metrics."""
        yield OPEN(float(self._gate.total))
        for closed, count in self._gate.refused.items():
            yield CLOSED(float(count), closed)
        for (method, result), count in self._requests.items():
            yield REQUESTS(float(count), method, result)
        for reason, count in self._guard.refused.items():
            yield REFUSED(float(count), reason)

    async def _tls(self) -> Tls | None:
        context = (await self._credentials.current()).server
        return None if context is None else Tls(context, frozenset())

    def _answered(self, request: BaseRequest, _response: StreamResponse) -> None:
        if request.method == "UNKNOWN":  # aiohttp's name for data that is not a request
            self._guard.refused[Rejection.MALFORMED] += 1

    async def _handle(self, request: BaseRequest) -> Response:
        connection = cast("PeerConnection", connection_of(request))
        connection.begin()
        call = Call()
        known = self._handlers.get(request.raw_path)
        try:
            if request.method != "POST" or (known is None and request.raw_path != PREFIX + NONCE):
                raise RequestRejected(Rejection.METHOD)  # noqa: TRY301 - answered like all others
            body = await self._guard.body(request, connection, call)
            if body is None or known is None:
                return self._answer(call, connection, HTTPStatus.OK, b"{}")
            name, handler, method = known
            message = _message(body, method)
        except RequestRejected as rejected:
            return self._reject(call, connection, rejected.reason)
        result, code = "ok", HTTPStatus.OK
        try:
            async with time_limit(HANDLER_TIMEOUT):
                answer = schema.dumps(await handler(call.claim.sender, message), method.answer)
        except Refusal as refusal:
            result, code, answer = "declined", HTTPStatus.CONFLICT, _refusal(refusal.reason)
        except TimeoutError:
            result, code, answer = TIMED_OUT, HTTPStatus.GATEWAY_TIMEOUT, _refusal(TIMED_OUT)
        self._requests[name, result] += 1
        return self._answer(call, connection, code, answer)

    def _reject(self, call: Call, connection: PeerConnection, reason: Rejection) -> Response:
        self._guard.refused[reason] += 1
        told = UNAUTHORIZED if reason in UNTOLD else reason
        code = HTTPStatus.FORBIDDEN if reason in UNTOLD else _CODES.get(reason, HTTPStatus.CONFLICT)
        again = call.proved or (reason is Rejection.STALE and connection.doubt())
        response = self._answer(call if again else Call(), connection, code, _refusal(told))
        if not again:
            response.force_close()
        return response

    def _answer(
        self, call: Call, connection: PeerConnection, code: HTTPStatus, body: bytes
    ) -> Response:
        """Return an answer to a peer, signed where its request was, with its next nonce."""
        headers = {"Content-Type": "application/json"}
        signature = self._guard.signature(call, code, body)
        if signature is not None:
            headers[ANSWER] = signature
        response = Response(status=code, body=body, headers=headers)
        if connection.aged:
            response.force_close()
        return response


def _message(body: bytes, method: Method) -> dict[str, Any]:
    try:
        return schema.loads(body, method.request)
    except SchemaError as error:
        log.debug("peer API: refused a message: %s", error)
        raise RequestRejected(Rejection.MALFORMED) from error


def _refusal(reason: str) -> bytes:
    return documents.dumps({"refusal": reason}).encode()
