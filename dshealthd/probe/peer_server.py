"""The peer listener: authenticates calls of other nodes, checks them against their schema, and hands them to handlers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, cast

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge
from aiohttp.web_protocol import RequestPayloadError
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response
from aiohttp.web_server import Server as Connections

from dshealthd.address import listen_address
from dshealthd.collector import counter, gauge
from dshealthd.probe import schema
from dshealthd.probe.credentials import Credentials
from dshealthd.probe.messages import METHODS, Method
from dshealthd.probe.nonces import Nonces
from dshealthd.probe.peer import (
    ABSENT,
    ANSWER,
    MAX_BODY,
    NONCE,
    PREFIX,
    TIMED_OUT,
    UNAUTHORIZED,
    UNTOLD,
    Claim,
    Refusal,
    Rejection,
    answer_mac,
    certificate_names,
    request_mac,
)
from dshealthd.probe.peer_connection import PeerConnection, PeerGate
from dshealthd.probe.schema import SchemaError
from dshealthd.web.listener import Listener
from dshealthd.web.tls import Tls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.streams import StreamReader
    from aiohttp.web_protocol import RequestHandler
    from aiohttp.web_response import StreamResponse

    from dshealthd.collector import Sample
    from dshealthd.probe.peer import PeerOptions

    Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

log = logging.getLogger(__name__)

OPEN = gauge("dshealthd_probe_peer_connections", "Open connections that other nodes, or strangers, made to the peer listener.")
LIMIT = gauge("dshealthd_probe_peer_connections_limit", "Connections that the peer listener serves at a time.")
CLOSED = counter(
    "dshealthd_probe_peer_connections_refused_total",
    "Connections that the peer listener closed because of a limit; replaced: it had proved nothing, and a newer one took its place.",
    "reason",
)
REQUESTS = counter(
    "dshealthd_probe_peer_requests_total", "Authenticated calls of other nodes, by how they were answered.", "method", "result"
)
REFUSED = counter(
    "dshealthd_probe_peer_requests_refused_total",
    "Requests to the peer listener refused before any handler: unauthenticated, malformed or beyond a limit.",
    "reason",
)
METRICS = (OPEN, LIMIT, CLOSED, REQUESTS, REFUSED)

HANDLER_TIMEOUT = 25.0
"""Seconds that a handler may take; a little less than what the connection allows."""
SHUTDOWN_TIMEOUT = 1.0
"""Seconds that answers in progress get when the listener closes."""


_CODES = {
    Rejection.STALE: HTTPStatus.UNAUTHORIZED,
    Rejection.RATE: HTTPStatus.TOO_MANY_REQUESTS,
    Rejection.METHOD: HTTPStatus.NOT_FOUND,
    Rejection.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Rejection.MALFORMED: HTTPStatus.BAD_REQUEST,
    Rejection.SLOW: HTTPStatus.REQUEST_TIMEOUT,
}


class Members(Protocol):
    """What the listener wants to know of the membership."""

    @property
    def names(self) -> Collection[str]:
        """The names of the nodes."""


class _Rejected(Exception):
    """The request in hand is refused."""

    def __init__(self, reason: Rejection) -> None:
        super().__init__(reason)
        self.reason = reason


class _Call:
    """A request, and what has been proved of it."""

    __slots__ = ("claim", "key", "method", "proved")

    def __init__(self) -> None:
        self.proved = False
        """Whether it comes from whom its claim says."""
        self.claim: Claim | None = None
        self.key: bytes | None = None
        """The key it was signed with; the answer is signed with the same."""
        self.method = ""


class PeerServer:
    """Serves the peer API."""

    def __init__(
        self,
        options: PeerOptions,
        me: str,
        members: Callable[[], Members],
        handlers: Mapping[str, Handler],
        *,
        credentials: Credentials | None = None,
        methods: Mapping[str, Method] = METHODS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to serve `handlers` as the node `me`; CredentialError. A handler gets the sender's name and its message as Python values.

        `credentials` are shared with the client, where there is one; else they are read here. A handler may raise `Refusal`.
        """
        self._options = options
        self._me = me
        self._members = members
        self._handlers = {PREFIX + name: (name, handler, methods[name]) for name, handler in handlers.items()}
        self._credentials = credentials or Credentials(options)
        self._nonces = Nonces(options.calls_per_second, options.burst, monotonic)
        self._gate = PeerGate(options.max_connections, options.max_connections_per_address)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[Rejection] = Counter(dict.fromkeys(Rejection, 0))
        self._connections: Connections | None = None
        self._listener = Listener(
            self._gate, self._connect, handshake_timeout=options.header_timeout, tls=self._tls if options.tls else None
        )

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._listener.port

    async def start(self) -> None:
        """Listen, if a listen address is configured; OSError when that is not possible."""
        if not self._options.listen_address:
            return
        if not self._options.tls and self._options.key_file is None:
            message = "the peer listener needs a key or certificates"
            raise ValueError(message)
        self._connections = Connections(self._handle, request_factory=self._request, handler_cancellation=True)
        await self._listener.start(*listen_address(self._options.listen_address))

    async def close(self) -> None:
        """Stop listening and close the connections; answers in progress get a second."""
        await self._listener.close()
        if self._connections is not None:
            self._connections.pre_shutdown()
            await self._connections.shutdown(SHUTDOWN_TIMEOUT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT):
                while self._gate.total:  # noqa: ASYNC110 - a transport closes its socket in a later turn of the loop
                    await asyncio.sleep(0.01)
        await self._credentials.close()

    def samples(self) -> Iterator[Sample]:
        """Yield the listener's own metrics."""
        yield OPEN(float(self._gate.total))
        yield LIMIT(float(self._gate.limit))
        for closed, count in self._gate.refused.items():
            yield CLOSED(float(count), closed)
        yield CLOSED(float(self._gate.evicted), "replaced")
        for (method, result), count in self._requests.items():
            yield REQUESTS(float(count), method, result)
        for reason, count in self._refused.items():
            yield REFUSED(float(count), reason)

    def _connect(self, client: str, tls: Tls | None) -> PeerConnection:
        return PeerConnection(
            cast("Connections", self._connections),
            self._gate,
            client,
            header_timeout=self._options.header_timeout,
            tls=tls,
            answered=self._answered,
        )

    async def _tls(self) -> Tls | None:
        context = (await self._credentials.current()).server
        return None if context is None else Tls(context, frozenset())

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        connection: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> BaseRequest:
        return BaseRequest(message, payload, connection, writer, task, asyncio.get_running_loop(), client_max_size=MAX_BODY)

    def _answered(self, request: BaseRequest, _response: StreamResponse) -> None:
        if request.method == "UNKNOWN":  # what aiohttp calls what is no request
            self._refused[Rejection.MALFORMED] += 1

    async def _handle(self, request: BaseRequest) -> Response:
        """Answer one request: authenticate it, check its message, and have it handled."""
        connection = cast("PeerConnection", request.protocol)
        connection.begin()
        call = _Call()
        try:
            body = await self._authenticated(request, connection, call)
            if body is None:
                return self._answer(call, connection, HTTPStatus.OK, b"{}")
            _, handler, method = self._handlers[request.raw_path]
            try:
                message = schema.loads(body, method.request)
            except SchemaError as error:
                log.debug("%s from %s: %s", call.method, cast("Claim", call.claim).sender, error)
                raise _Rejected(Rejection.MALFORMED) from error
        except _Rejected as rejected:
            return self._reject(call, connection, rejected.reason)
        result, code = "ok", HTTPStatus.OK
        try:
            async with asyncio.timeout(HANDLER_TIMEOUT):
                answer = schema.dumps(await handler(cast("Claim", call.claim).sender, message), method.answer)
        except Refusal as refusal:
            result, code, answer = "declined", HTTPStatus.CONFLICT, _refusal(refusal.reason)
        except TimeoutError:
            result, code, answer = TIMED_OUT, HTTPStatus.GATEWAY_TIMEOUT, _refusal(TIMED_OUT)
        self._requests[call.method, result] += 1
        return self._answer(call, connection, code, answer)

    async def _authenticated(self, request: BaseRequest, connection: PeerConnection, call: _Call) -> bytes | None:
        """Return the body of a request that may be handled; None where only a nonce is asked for; raises _Rejected."""
        if request.method != "POST" or (request.raw_path not in self._handlers and request.raw_path != PREFIX + NONCE):
            raise _Rejected(Rejection.METHOD)
        length = _content_length(request)
        authorization = request.headers.getall("Authorization", ())
        claim = Claim.parse(authorization[0]) if len(authorization) == 1 else None
        if claim is None:
            raise _Rejected(Rejection.NO_CREDENTIALS)
        if length > MAX_BODY:
            raise _Rejected(Rejection.TOO_LARGE)
        body = await self._body(request)
        call.claim = claim
        if request.raw_path == PREFIX + NONCE:
            if self._options.key_file is None or body or not connection.doubt():
                raise _Rejected(Rejection.MALFORMED)
            return None
        call.method = self._handlers[request.raw_path][0]
        if self._options.tls and not self._has_certificate(claim.sender, connection.certificate):
            raise _Rejected(Rejection.CERTIFICATE)
        secrets = await self._credentials.current()
        if self._options.key_file is not None:
            self._check_key(request.raw_path, body, claim, call, secrets.keys)
        call.proved = True
        connection.prove()
        if claim.receiver != self._me:
            raise _Rejected(Rejection.RECEIVER)
        if claim.sender == self._me:
            raise _Rejected(Rejection.SELF)
        if claim.sender not in self._members().names:
            raise _Rejected(Rejection.SENDER)
        if not self._nonces.admit(claim.sender):
            raise _Rejected(Rejection.RATE)
        if self._credentials.off:
            raise _Rejected(Rejection.OFF)
        return body

    def _check_key(self, path: str, body: bytes, claim: Claim, call: _Call, keys: tuple[bytes, ...]) -> None:
        fitting = [key for key in keys if hmac.compare_digest(request_mac(key, path, body, claim), claim.mac)]
        if not fitting or claim.challenge == ABSENT:
            raise _Rejected(Rejection.KEY)
        if not self._nonces.fresh(claim.nonce, claim.sender):
            raise _Rejected(Rejection.STALE)
        if not self._nonces.spend(claim.nonce, claim.sender):
            raise _Rejected(Rejection.REPLAYED)
        call.key = fitting[0]

    def _has_certificate(self, sender: str, certificate: Mapping[str, Any]) -> bool:
        return self._options.certificate_name(sender) in certificate_names(certificate)

    async def _body(self, request: BaseRequest) -> bytes:
        try:
            async with asyncio.timeout(self._options.header_timeout):
                return await request.read()
        except TimeoutError as error:
            raise _Rejected(Rejection.SLOW) from error
        except HTTPRequestEntityTooLarge as error:
            raise _Rejected(Rejection.TOO_LARGE) from error
        except (RequestPayloadError, HttpProcessingError) as error:
            raise _Rejected(Rejection.MALFORMED) from error

    def _reject(self, call: _Call, connection: PeerConnection, reason: Rejection) -> Response:
        self._refused[reason] += 1
        told = UNAUTHORIZED if reason in UNTOLD else reason
        code = HTTPStatus.FORBIDDEN if reason in UNTOLD else _CODES.get(reason, HTTPStatus.CONFLICT)
        again = call.proved or (reason is Rejection.STALE and connection.doubt())
        response = self._answer(call if again else _Call(), connection, code, _refusal(told))
        if not again:
            response.force_close()
        return response

    def _answer(self, call: _Call, connection: PeerConnection, code: HTTPStatus, body: bytes) -> Response:
        """Return an answer, signed where its request was, with the next nonce for its sender."""
        headers = {"Content-Type": "application/json"}
        if call.claim is not None and self._options.key_file is not None:
            nonce = self._nonces.issue(call.claim.sender)
            mac = ABSENT if call.key is None else answer_mac(call.key, call.claim.mac, code, body, nonce)
            headers[ANSWER] = f"{nonce} {mac}"
        response = Response(status=code, body=body, headers=headers)
        if connection.aged:
            response.force_close()
        return response


def _content_length(request: BaseRequest) -> int:
    """Return the length of a request's body; what could be read in two ways, or has to be unpacked, is refused."""
    lengths = request.headers.getall("Content-Length", ())
    if any(name in request.headers for name in ("Transfer-Encoding", "Content-Encoding", "Upgrade", "Expect")):
        raise _Rejected(Rejection.MALFORMED)
    if len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
        raise _Rejected(Rejection.MALFORMED)
    return int(lengths[0])


def _refusal(reason: str) -> bytes:
    return json.dumps({"refusal": reason}).encode()
