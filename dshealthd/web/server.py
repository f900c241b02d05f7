"""The agent's web server: its paths and their answers.

`/`, `/fleet`, `/metrics`, `/runbooks/SLUG`, `/api/v1/status`, `/api/v1/history`, `/api/v1/trends`,
`/api/v1/fleet`, `/api/v1/targets`, `/-/healthy`, `/-/ready`, `/-/fit`.
"""

from __future__ import annotations

import errno
import functools
import gzip
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aiohttp.web_response import Response, StreamResponse

from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.documents import LeftOut
from dshealthd.core.exposition import CONTENT_TYPE, Tier
from dshealthd.core.sockets import listen_address
from dshealthd.findings.catalogue import RUNBOOKS
from dshealthd.http.connection import connection_of, plain_answer
from dshealthd.http.connection_limiter import ConnectionLimiter, client_of
from dshealthd.http.listener import Listener
from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.runbooks import render
from dshealthd.web import status
from dshealthd.web.hostnames import is_misdirected, own_names, search_domains
from dshealthd.web.page_files import ASSETS, PAGE_HEADERS, page_files

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest

    from dshealthd.config.config import Web
    from dshealthd.core.self_metrics import SelfMetrics
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.http.tls import Tls
    from dshealthd.nvrx.fitness import Fitness

REQUESTS = counter(
    "dshealthd_web_requests_total",
    "Requests answered; path other is any unknown path, or an invalid request.",
    "path",
    "code",
)
CONFIG_OK = gauge(
    "dshealthd_web_config_last_reload_successful",
    "1 if the last read of web.config_file and its certificates was valid; 0 while "
    "the previous one is kept.",
)
CONFIG_FAILURES = counter(
    "dshealthd_web_config_reload_failures_total",
    "Changes to web.config_file or its certificates that were invalid.",
)

MISDIRECTED = "this node has another name; add the one in the address bar to web.hostnames"
TIERS = f"the only parameter is tier, once: {' or '.join(Tier)}"
"""Answer to a scrape with another query string."""
DOCUMENT_KEPT = 0.5
"""Seconds for which a document is cached.

Building one takes up to a thousand times as long as a scrape, and anyone may ask for it, however
often.
"""
HEALTHY = "/-/healthy"
FIT = "/-/fit"
FIT_CHARACTERS = 80
"""Most characters of an answer of `/-/fit`: node-problem-detector cuts a plugin's output there."""
DOCUMENT_HEADERS = {
    "Content-Type": "application/json",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
CHALLENGE = 'Basic realm="dshealthd", charset="UTF-8"'


class ListenError(Exception):
    """The agent cannot listen on its address; the message says why."""


def _why(error: OSError) -> str:
    """Return why the web server cannot use an address, and what to do about it."""
    if error.errno == errno.EADDRINUSE:
        hint = "find the listener with `ss -ltnp`, or set another port with --web.listen-address"
        return f"{os.strerror(errno.EADDRINUSE)}; {hint}"
    return os.strerror(error.errno) if error.errno else str(error)  # asyncio's repeats the address


class Server:
    """Serves a snapshot over HTTP."""

    def __init__(
        self,
        options: Web,
        snapshot: Snapshot,
        own: Callable[[], Iterable[Sample]],
        names: Callable[[], tuple[str, str]],
        telemetry: SelfMetrics,
        unready: Callable[[], str],
        sections: Callable[[LeftOut], Mapping[str, Any]] = lambda _left_out: {},
        documents: Mapping[str, Callable[[], bytes | Awaitable[bytes]]] = MappingProxyType({}),
        fitness: Callable[[], Fitness] | None = None,
    ) -> None:
        """Prepare to serve `snapshot` and the agent's `own` samples; `start` opens the socket.

        Raise ConfigError for an invalid web config file.

        `names` returns the host's name, and the probes' for this node, by which pages of other
        agents lead here; `unready` returns why nothing follows from the findings yet, empty once
        all sources were judged; `sections` returns further parts of the status document, by name,
        and notes what it leaves out; `documents` are the others by path, whose makers raise
        LookupError while they are unknown; `fitness` judges whether a job can start on this node.
        """
        self._fitness = fitness
        self._unready = unready
        self._sections = sections
        self._options = options
        self._snapshot = snapshot
        self._own, self._names = own, names
        self._telemetry = telemetry
        self._begun = time.monotonic()
        self._domains = search_domains()
        self._gate = ConnectionLimiter(options.max_connections, options.max_connections_per_address)
        self._requests: Counter[tuple[str, int]] = Counter()
        self._kept: dict[str, tuple[float, bytes]] = {}
        """The last document of each path, and the monotonic time from which it is."""
        self._packed: dict[str, tuple[bytes, bytes]] = {}
        """The last document of each path that was asked for compressed, as it is and compressed."""
        self._config = None
        # Imported only by agents that need it.
        if options.config_file is not None:
            from dshealthd.web.auth import Authenticator
            from dshealthd.web.config_file import WebConfigFile

            self._config = WebConfigFile(options.config_file)
            self._authenticator = Authenticator()
        self._page = page_files()
        for slug, symptom in all_symptoms().items():
            self._page[RUNBOOKS + slug] = render(symptom).encode(), "text/plain; charset=utf-8"
        self._routes: dict[str, Callable[[BaseRequest], Response | Awaitable[Response]]] = {
            "/metrics": self._metrics,
            "/api/v1/status": functools.partial(self._document, self.status),
            **{path: functools.partial(self._document, make) for path, make in documents.items()},
            HEALTHY: self._healthy,
            "/-/ready": self._ready,
            FIT: self._fit,
            **dict.fromkeys(self._page, self._page_file),
        }
        self._listener = Listener(
            self._gate,
            self._handle,
            self._answered,
            header_timeout=options.header_timeout,
            tls=None if self._config is None else self._tls,
        )

    async def start(self) -> None:
        """Open the web server's socket, or raise ListenError."""
        try:
            await self._listener.start(*listen_address(self._options.listen_address))
        except OSError as error:
            message = f"cannot serve on {self._options.listen_address}: {_why(error)}"
            raise ListenError(message) from error

    async def close(self) -> None:
        """Close the socket and the connections; answers in progress get a second."""
        await self._listener.close()

    @property
    def port(self) -> int:
        """The TCP port that the web server listens on."""
        return self._listener.port

    def url(self, hostname: str) -> str:
        """Return the page's URL as a user would type it."""
        host = _to_open(self._options.listen_address, hostname)
        scheme = "http" if self._config is None or self._config.config.tls is None else "https"
        return f"{scheme}://{host}:{self.port}/"

    def samples(self) -> Iterator[Sample]:
        """Yield the web server's own metrics."""
        yield from self._gate.samples()
        for (path, code), count in self._requests.items():
            yield REQUESTS(float(count), path, str(code))
        if self._config is not None:
            yield CONFIG_OK(float(self._config.ok))
            yield CONFIG_FAILURES(float(self._config.failures))

    async def _tls(self) -> Tls | None:
        return None if self._config is None else (await self._config.current()).tls

    def _answered(self, request: BaseRequest, response: StreamResponse) -> None:
        path = (
            request.path
            if request.path in self._routes and request.method != "UNKNOWN"
            else "other"
        )
        for folder in (ASSETS, RUNBOOKS):
            if path.startswith(folder):
                path = folder
        self._requests[path, response.status] += 1
        if self._config is not None:
            for name, value in self._config.config.headers.items():
                response.headers.pop(name, None)
                if value:
                    response.headers[name] = value

    async def _handle(self, request: BaseRequest) -> Response:
        """Answer one HTTP request: authenticate, refuse a body, and look up the path."""
        connection_of(request).begin()
        path = request.path
        node, member = self._names()  # a node may be renamed while its agent runs
        names = own_names(node, self._domains, filter(None, (member, *self._options.hostnames)))
        if is_misdirected(request.headers, names):
            return plain_answer(HTTPStatus.MISDIRECTED_REQUEST, MISDIRECTED)
        if self._config is not None and path != HEALTHY:
            users = (await self._config.current()).users
            given, client = request.headers.get("Authorization"), client_of(request.remote or "")
            code = await self._authenticator.refusal(users, given, client) if users else None
            if code is HTTPStatus.UNAUTHORIZED:
                return plain_answer(code, **{"WWW-Authenticate": CHALLENGE})
            if code is not None:
                return plain_answer(code, **{"Retry-After": "1"})
        if request.body_exists:
            refusal = plain_answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no path takes a body")
            refusal.force_close()  # it is not read
            return refusal
        route = self._routes.get(path)
        if route is None:
            return plain_answer(HTTPStatus.NOT_FOUND)
        if request.method not in {"GET", "HEAD"}:
            return plain_answer(HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
        answer = route(request)
        return answer if isinstance(answer, Response) else await answer

    def _metrics(self, request: BaseRequest) -> Response:
        """Answer a scrape: everything, or the tier that the query string asks for.

        A query string that is not understood is refused, as a typing error in a scrape's parameters
        would otherwise cost a server many times the series that it was made for.
        """
        asked = list(request.query.items())
        try:
            ((name, tier),) = asked or [("tier", Tier.ALL)]
            chosen = Tier(tier) if name == "tier" else None
        except (ValueError, ArithmeticError):
            chosen = None
        if chosen is None:
            return plain_answer(HTTPStatus.BAD_REQUEST, TIERS)
        body = self._snapshot.body(self._own, chosen)
        return Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    def status(self) -> bytes:
        """Return the status document as of now."""
        left_out = LeftOut()
        return status.document(
            self._snapshot,
            self._own(),
            node=self._names()[0],
            started=self._telemetry.started,
            begun=self._begun,
            monotonic=time.monotonic(),
            wall=time.time(),
            ready=not self._unready(),
            sections=self._sections(left_out),
            left_out=left_out,
        )

    async def _document(
        self, make: Callable[[], bytes | Awaitable[bytes]], request: BaseRequest
    ) -> Response:
        """Answer with a document, at most `DOCUMENT_KEPT` seconds old; 503 while it is unknown, at
        which Prometheus keeps its previous targets.
        """
        now = time.monotonic()
        made, body = self._kept.get(request.path, (-math.inf, b""))
        if now - made >= DOCUMENT_KEPT:
            try:
                document = make()
                body = document if isinstance(document, bytes) else await document
            except LookupError as error:
                return plain_answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            self._kept[request.path] = now, body
        headers = {**DOCUMENT_HEADERS, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            # A fifteenth of the size, for a phone on a slow link.
            headers["Content-Encoding"] = "gzip"
            last, packed = self._packed.get(request.path, (b"", b""))
            if last is not body:
                packed = gzip.compress(body, 1)
                self._packed[request.path] = body, packed
            body = packed
        return Response(body=body, headers=headers)

    def _page_file(self, request: BaseRequest) -> Response:
        body, kind = self._page[request.path]
        return Response(body=body, headers={"Content-Type": kind, **PAGE_HEADERS})

    def _healthy(self, _request: BaseRequest) -> Response:
        return plain_answer(HTTPStatus.OK, "healthy")

    def _ready(self, _request: BaseRequest) -> Response:
        if why := self._unready():
            return plain_answer(HTTPStatus.SERVICE_UNAVAILABLE, why)
        return plain_answer(HTTPStatus.OK, "ready")

    def _fit(self, _request: BaseRequest) -> Response:
        """Answer a scheduler that asks whether to start a job here: 200 if the node is fit.

        Otherwise 503, with a text that begins with `unfit:` or `unknown:`, so that even a scheduler
        that treats both alike can show which it is.
        """
        if self._fitness is None:
            return plain_answer(HTTPStatus.NOT_FOUND)
        fitness = self._fitness()
        if fitness.fit:
            return plain_answer(HTTPStatus.OK, "fit")
        if fitness.failures:
            first, *others = (f"{failure.check} ({failure.part})" for failure in fitness.failures)
            text = f"unfit: {first}" + (f" and {len(others)} more" if others else "")
        else:
            text = f"unknown: {fitness.unknown[0]}"
        return plain_answer(HTTPStatus.SERVICE_UNAVAILABLE, " ".join(text.split())[:FIT_CHARACTERS])


def _to_open(address: str, hostname: str) -> str:
    """Return the host that a person can open for a listen address; 0.0.0.0 is none."""
    host, _ = listen_address(address)
    if host is None or host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not listened on
        return hostname
    return f"[{host}]" if ":" in host else host
