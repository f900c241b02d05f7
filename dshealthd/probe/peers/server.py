"""The peer listener: authenticates other nodes' calls, checks them and passes them to handlers."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.schema import SchemaError
from dshealthd.core.sockets import listen_address
from dshealthd.core.timing import time_limit
from dshealthd.http.listener import Listener
from dshealthd.probe.peers.connection import PeerConnection, PeerGate
from dshealthd.probe.peers.credentials import Credentials
from dshealthd.probe.peers.guard import Guard, PeerLimits, RequestRejected
from dshealthd.probe.peers.messages import METHODS, VERSIONS
from dshealthd.probe.peers.protocol import OK, TIMED_OUT, Refusal, Rejection, to_frame

if TYPE_CHECKING:
    from dshealthd.probe.options import PeerOptions
    from dshealthd.probe.peers.resolver import Resolver

    Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

log = logging.getLogger(__name__)

OPEN = gauge("dshealthd_probe_peer_connections", "Open connections to the peer listener.")
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
        limits: PeerLimits | None = None,
    ) -> None:
        """Prepare to serve `handlers` as the node `me`. Raises CredentialError.

        A handler gets the sender's name and its message as Python values, and may raise `Refusal`.

        `credentials` are shared with the client, if there is one; otherwise they are read here.
        `resolver`, if given, gives the addresses from which each member may call.
        """
        limits = limits or PeerLimits()
        self._options = options
        self._handlers = {
            f"{name} {VERSIONS[name]}".encode(): (name, handler, METHODS[name])
            for name, handler in handlers.items()
        }
        self._credentials = credentials or Credentials(options)
        self._guard = Guard(options, limits, me, members, self._credentials, monotonic, resolver)
        self._gate = PeerGate(limits.connections, limits.connections_per_address)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._listener = Listener(
            self._gate,
            None,
            header_timeout=limits.patience,
            connection=functools.partial(PeerConnection, self._serve),
        )

    @property
    def port(self) -> int:
        """The port of the peer listener."""
        return self._listener.port

    async def start(self) -> None:
        """Listen for peers at the configured address. Raises OSError if that fails."""
        await self._listener.start(*listen_address(self._options.listen_address))

    async def close(self) -> None:
        """Stop listening for peers and close the connections; answers in progress get a second."""
        self._gate.end()
        await self._listener.close()
        self._gate.close_answering()
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

    async def _serve(self, connection: PeerConnection, frame: bytes | None) -> None:
        """Answer a frame that came to the peer listener, or refuse it."""
        try:
            if frame is None:
                raise RequestRejected(Rejection.MALFORMED)  # noqa: TRY301 - answered like others
            if connection.hello is None:
                connection.answer(self._guard.greet(connection, frame))
                return
            request = await self._guard.request(connection, connection.hello, frame)
            content = await self._answer(connection.hello.sender, request)
        except RequestRejected as rejected:
            self._guard.refused[rejected.reason] += 1
            if rejected.reason is Rejection.KEY:
                connection.refuse(to_frame(b""))
                return
            if frame is None or connection.session is None:
                connection.refuse()
                return
            content = rejected.reason.encode()
        if connection.session is not None:
            connection.answer(connection.session.sign("answer", content))

    async def _answer(self, sender: str, request: bytes) -> bytes:
        """Have a request handled; return the content of its answer. Raises RequestRejected."""
        *called, body = request.split(b" ", 2)
        known = self._handlers.get(b" ".join(called))
        if known is None:
            raise RequestRejected(Rejection.VERSION)
        name, handler, method = known
        try:
            message = schema.loads(body, method.request)
        except SchemaError as error:
            log.debug("peer API: refused a message: %s", error)
            raise RequestRejected(Rejection.MALFORMED) from error
        result = OK
        try:
            async with time_limit(HANDLER_TIMEOUT):
                answer = schema.dumps(await handler(sender, message), method.answer)
                content = b" ".join((OK.encode(), answer))
        except Refusal as refusal:
            result, content = "declined", refusal.reason.encode()
        except TimeoutError:
            result, content = TIMED_OUT, TIMED_OUT.encode()
        self._requests[name, result] += 1
        return content
