"""The client of the peer API: calls other nodes' agents and classifies failures.

It uses plain asyncio connections, not aiohttp's client: the cause of a failure is known exactly,
nothing is redirected, proxied or unpacked, and a call takes some 0.6 of the CPU time.
`bench/bench_peer.py` measures a call with all its checks.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import Counter
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.core.collector import counter, gauge
from dshealthd.core.schema import Record, SchemaError
from dshealthd.core.timing import time_limit
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.credentials import Credentials
from dshealthd.probe.peers.link import BadAnswer, Link, UnverifiedAnswer
from dshealthd.probe.peers.messages import METHODS, KnownReason, Method
from dshealthd.probe.peers.nonces import LIFETIME
from dshealthd.probe.peers.pool import ConnectionPool, meaning
from dshealthd.probe.peers.protocol import (
    ABSENT,
    ANSWER,
    MAX_BODY,
    NONCE,
    PREFIX,
    TIMED_OUT,
    PeerError,
    Rejection,
    RequestClaim,
    TimeoutMeaning,
    answer_mac,
    parse_answer,
    request_mac,
)
from dshealthd.probe.peers.resolver import Resolver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.core.collector import Sample
    from dshealthd.probe.options import PeerOptions

CALLS = counter(
    "dshealthd_probe_peer_calls_total", "Calls made to other nodes' agents.", "method", "outcome"
)
OPEN = gauge(
    "dshealthd_probe_peer_client_connections",
    "Connections to other nodes' agents that are in use or idle.",
)
OPENED = counter(
    "dshealthd_probe_peer_client_connections_opened_total",
    "Connections made to other nodes' agents.",
)

MAX_PER_PEER = 4
"""Concurrent calls to one peer, each on its own connection; further ones wait."""
NONCE_MARGIN = 2.0
"""Seconds before a nonce expires in which it is not used: it has to reach the peer in time."""
REFUSAL = Record({"refusal": KnownReason()})
_OUTCOMES: Mapping[str, Outcome] = {
    Rejection.RECEIVER: Outcome.UNAUTHORIZED,
    Rejection.SELF: Outcome.UNAUTHORIZED,
    Rejection.METHOD: Outcome.FAILED,
    Rejection.MALFORMED: Outcome.FAILED,
    Rejection.TOO_LARGE: Outcome.FAILED,
    TIMED_OUT: Outcome.HUNG,
}
"""Outcomes of a peer's refusals that are not its own decision; any other means declined."""


class PeerClient:
    """Calls other nodes' agents."""

    def __init__(
        self,
        options: PeerOptions,
        me: str,
        addresses: Callable[[str], tuple[str, int]],
        *,
        credentials: Credentials | None = None,
        resolver: Resolver | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to call as the node `me`. Raises CredentialError. `addresses` returns the host
        (name or address) and port of a member.
        """
        self._options = options
        self._me = me
        self._credentials = credentials or Credentials(options)
        self._pool = ConnectionPool(
            options, addresses, resolver or Resolver(monotonic=monotonic), monotonic
        )
        self._monotonic = monotonic
        self._wall = wall
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._callers: Counter[str] = Counter()
        self._calls: Counter[tuple[str, Outcome]] = Counter()

    async def call(
        self, peer: str, method: str, body: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        """Return a peer's answer within `deadline` seconds, as the Python values that `messages`
        declares. Raises PeerError. Raises SchemaError, before anything is sent, if `body` does not
        fit the method's schema.
        """
        declared = METHODS[method]
        message = schema.dumps(body, declared.request)
        if len(message) > MAX_BODY:
            problem = f"a message of {len(message)} bytes is too large to send"
            raise SchemaError(problem)
        on_timeout, outcome = TimeoutMeaning(), Outcome.INCONCLUSIVE  # unless it is cancelled
        try:
            async with time_limit(deadline):
                answer = await self._in_turn(peer, PREFIX + method, message, on_timeout)
            answer_ = _read(answer, declared)
            outcome = Outcome.OK
        except PeerError as error:
            outcome = error.outcome
            raise
        except TimeoutError as error:
            outcome = on_timeout.outcome
            raise PeerError(on_timeout.outcome, on_timeout.reason) from error
        finally:
            self._calls[method, outcome] += 1
        return answer_

    def forget(self, peer: str) -> None:
        """Close the idle connections to a peer, such as one that has left the membership."""
        self._pool.forget(peer)

    async def close(self) -> None:
        """Close all the client's connections to peers."""
        await self._pool.close()
        await self._credentials.close()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of calls to peers."""
        for (method, outcome), count in self._calls.items():
            yield CALLS(float(count), method, outcome)
        yield OPEN(float(len(self._pool)))
        yield OPENED(float(self._pool.opened))

    async def _in_turn(
        self, peer: str, path: str, body: bytes, on_timeout: TimeoutMeaning
    ) -> UnverifiedAnswer:
        turn = self._turns.setdefault(peer, asyncio.Semaphore(MAX_PER_PEER))
        self._callers[peer] += 1
        try:
            async with turn:
                return await self._exchange(peer, path, body, on_timeout)
        finally:
            self._callers[peer] -= 1
            if not self._callers[peer]:
                del self._callers[peer], self._turns[peer]

    async def _exchange(
        self, peer: str, path: str, body: bytes, on_timeout: TimeoutMeaning
    ) -> UnverifiedAnswer:
        current = await self._credentials.current()
        link = await self._pool.acquire(peer, current.client, on_timeout)
        keep = False
        try:
            if self._options.key_file is None:
                answer = await _send(link, path, body, RequestClaim(self._me, peer), on_timeout)
            else:
                answer = await self._ask_signed(
                    link, path, body, RequestClaim(self._me, peer), current.keys[0], on_timeout
                )
            keep = answer.status in {
                HTTPStatus.OK,
                HTTPStatus.CONFLICT,
                HTTPStatus.TOO_MANY_REQUESTS,
            }
        except PeerError as error:
            if (
                error.outcome is Outcome.UNAUTHORIZED
                and current.own is not None
                and (problem := current.own.problem(self._wall()))
            ):
                raise PeerError(error.outcome, problem) from error
            raise
        finally:
            self._pool.release(link, peer, keep=keep)
        return answer

    async def _ask_signed(
        self,
        link: Link,
        path: str,
        body: bytes,
        claim: RequestClaim,
        key: bytes,
        on_timeout: TimeoutMeaning,
    ) -> UnverifiedAnswer:
        """Return the peer's verified answer to a signed request. Retry once with a new nonce if the
        first was too old for the peer.
        """
        if self._monotonic() >= link.nonce_until:
            await self._ask_nonce(link, claim, on_timeout)
        for last in (False, True):
            signed = replace(claim, nonce=link.nonce, challenge=secrets.token_hex(16))
            signed = replace(signed, mac=request_mac(key, path, body, signed))
            # A nonce is good for one request: if this one is cut off, the peer may have seen it.
            link.nonce_until = 0.0
            answer = await _send(link, path, body, signed, on_timeout)
            nonce, mac = parse_answer(answer.headers.get(ANSWER.lower(), "")) or (ABSENT, ABSENT)
            if hmac.compare_digest(
                mac, answer_mac(key, signed.mac, answer.status, answer.body, nonce)
            ):
                self._keep_nonce(link, nonce)
                return answer
            if answer.status != HTTPStatus.UNAUTHORIZED or nonce == ABSENT or last:
                break
            self._keep_nonce(link, nonce)
        raise _unverified(answer)

    async def _ask_nonce(self, link: Link, claim: RequestClaim, on_timeout: TimeoutMeaning) -> None:
        answer = await _send(link, PREFIX + NONCE, b"", claim, on_timeout)
        nonce, _ = parse_answer(answer.headers.get(ANSWER.lower(), "")) or (ABSENT, ABSENT)
        if answer.status != HTTPStatus.OK or nonce == ABSENT:
            raise _unverified(answer)
        self._keep_nonce(link, nonce)

    def _keep_nonce(self, link: Link, nonce: str) -> None:
        link.nonce = nonce
        link.nonce_until = self._monotonic() + LIFETIME - NONCE_MARGIN


async def _send(
    link: Link, path: str, body: bytes, claim: RequestClaim, on_timeout: TimeoutMeaning
) -> UnverifiedAnswer:
    head = f"POST {path} HTTP/1.1\r\nHost: {claim.receiver}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nAuthorization: {claim}\r\n\r\n"
    on_timeout.becomes(Outcome.HUNG, "no_answer")
    try:
        return await link.send(head.encode() + body)
    except asyncio.CancelledError:
        if link.unacknowledged():
            on_timeout.becomes(Outcome.UNREACHABLE, "not_acknowledged")
        raise
    except BadAnswer as error:
        raise PeerError(Outcome.FAILED, "bad_answer") from error
    except OSError as error:  # what ssl raises is one too
        # asyncio's TLS sends no alert: it closes the connection when it rejects the certificate.
        if link.secured and not link.answered:
            raise PeerError(Outcome.UNAUTHORIZED, "closed_after_handshake") from error
        raise PeerError(*meaning(error)) from error


def _read(answer: UnverifiedAnswer, method: Method) -> dict[str, Any]:
    """Return what a verified answer says; PeerError if it is a refusal or malformed."""
    try:
        if answer.status == HTTPStatus.OK:
            return schema.loads(answer.body, method.answer)
        reason: str = schema.loads(answer.body, REFUSAL)["refusal"]
    except SchemaError as error:
        raise PeerError(
            Outcome.FAILED,
            "bad_answer" if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR else "peer_error",
        ) from error
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise PeerError(Outcome.UNAUTHORIZED, "rejected")
    raise PeerError(_OUTCOMES.get(reason, Outcome.DECLINED), reason or "bad_answer")


def _unverified(answer: UnverifiedAnswer) -> PeerError:
    """Return what an unsigned answer means, whose contents do not count."""
    if answer.status == HTTPStatus.OK:
        return PeerError(Outcome.UNAUTHORIZED, "answer_not_signed")
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return PeerError(Outcome.UNAUTHORIZED, "rejected")
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return PeerError(Outcome.FAILED, "peer_error")
    return PeerError(Outcome.FAILED, "bad_answer")
