"""The client of the peer API: calls other nodes' agents and classifies failures.

`bench/bench_peer.py` measures a call with all its checks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.schema import Record, SchemaError
from dshealthd.core.timing import time_limit
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.credentials import Credentials
from dshealthd.probe.peers.fields import KnownReason
from dshealthd.probe.peers.messages import METHODS, VERSIONS
from dshealthd.probe.peers.pool import ConnectionPool, Link, error_meaning
from dshealthd.probe.peers.protocol import (
    DEFECT,
    MAX_MESSAGE,
    OK,
    TIMED_OUT,
    FrameError,
    Hello,
    PeerError,
    PeerSession,
    TimeoutMeaning,
    new_challenge,
    parse_challenge,
    to_frame,
)
from dshealthd.probe.peers.resolver import Resolver

if TYPE_CHECKING:
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

ANSWER = 2.0
"""Seconds for an answer that takes no work, which usually comes within milliseconds."""
MAX_PER_PEER = 4
"""Concurrent calls to one peer, each on its own connection; further ones wait."""
_OUTCOMES: Mapping[str, Outcome] = {DEFECT: Outcome.FAILED, TIMED_OUT: Outcome.HUNG}
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
    ) -> None:
        """Prepare to call as the node `me`. Raises CredentialError. `addresses` returns the host
        (name or address) and port of a member.
        """
        self._me = me
        self._credentials = credentials or Credentials(options)
        self._pool = ConnectionPool(
            options, addresses, resolver or Resolver(monotonic=monotonic), monotonic
        )
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._calls: Counter[tuple[str, Outcome]] = Counter()

    async def call(
        self, peer: str, method: str, body: Mapping[str, Any], deadline: float | None = None
    ) -> dict[str, Any]:
        """Return a peer's answer within `deadline` seconds, or `ANSWER`, as the Python values that
        `messages` declares. Raises PeerError. Raises SchemaError, before anything is sent, if the
        `body` does not fit the method's schema.
        """
        declared = METHODS[method]
        called = f"{method} {VERSIONS[method]} ".encode()
        request = called + schema.dumps(body, declared.request)
        if len(request) > MAX_MESSAGE:
            raise SchemaError(f"a message of {len(request)} bytes is too large to send")
        on_timeout, outcome = TimeoutMeaning(), Outcome.INCONCLUSIVE  # unless it is cancelled
        try:
            turn = self._turns.setdefault(peer, asyncio.Semaphore(MAX_PER_PEER))
            async with time_limit(ANSWER if deadline is None else deadline), turn:
                content = await self._exchange(peer, request, on_timeout)
            answer = _read(content, declared.answer)
            outcome = Outcome.OK
        except PeerError as error:
            outcome = error.outcome
            raise
        except TimeoutError as error:
            outcome = on_timeout.outcome
            raise PeerError(on_timeout.outcome, on_timeout.reason) from error
        finally:
            self._calls[method, outcome] += 1
        return answer

    def forget(self, peer: str) -> None:
        """Close the idle connections to a peer that has left the membership."""
        self._turns.pop(peer, None)
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

    async def _exchange(self, peer: str, request: bytes, on_timeout: TimeoutMeaning) -> bytes:
        """Return the peer's verified answer to a signed request."""
        key = self._credentials.current()[0]
        link = await self._pool.acquire(peer, key, on_timeout)
        content = None
        try:
            if link.session is None:
                hello = Hello(self._me, peer, new_challenge())
                challenge = parse_challenge(await _send(link, to_frame(bytes(hello)), on_timeout))
                if challenge is None:
                    raise PeerError(Outcome.FAILED, "bad_answer")
                link.session = PeerSession(key, hello, challenge)
            frame = await _send(link, link.session.sign("request", request), on_timeout)
            content = link.session.verified("answer", frame)
            if content is None:
                reason = "answer_not_signed" if frame else "rejected"
                raise PeerError(Outcome.UNAUTHORIZED, reason)
            return content
        finally:
            self._pool.release(link, peer, keep=content is not None)


async def _send(link: Link, frame: bytes, on_timeout: TimeoutMeaning) -> bytes:
    on_timeout.becomes(Outcome.HUNG, "no_answer")
    try:
        return await link.send(frame)
    except asyncio.CancelledError:
        if link.unacknowledged():
            on_timeout.becomes(Outcome.UNREACHABLE, "not_acknowledged")
        raise
    except FrameError as error:
        raise PeerError(Outcome.FAILED, "bad_answer") from error
    except OSError as error:
        raise PeerError(*error_meaning(error)) from error


def _read(content: bytes, declared: Record) -> dict[str, Any]:
    """Return what a verified answer says; PeerError if it is a refusal or malformed."""
    status, _, message = content.partition(b" ")
    try:
        if status == OK.encode():
            return schema.loads(message, declared)
        reason = KnownReason().read(status.decode("ascii", "replace"), "the reason")
    except SchemaError as error:
        raise PeerError(Outcome.FAILED, "bad_answer") from error
    raise PeerError(_OUTCOMES.get(reason, Outcome.DECLINED), reason or "bad_answer")
