"""The guard of the peer API: authenticates and limits requests before their messages are parsed.

Cheap checks come first, and nothing that a stranger sends is parsed except one header.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge
from aiohttp.web_protocol import RequestPayloadError

from dshealthd.core.timing import time_limit
from dshealthd.probe.peers.nonces import Nonces
from dshealthd.probe.peers.protocol import (
    ABSENT,
    MAX_BODY,
    NONCE,
    PREFIX,
    Rejection,
    RequestClaim,
    answer_mac,
    certificate_names,
    request_mac,
)
from dshealthd.probe.peers.resolver import LookupFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aiohttp.web_request import BaseRequest

    from dshealthd.probe.options import PeerOptions
    from dshealthd.probe.peers.connection import PeerConnection
    from dshealthd.probe.peers.credentials import Credentials
    from dshealthd.probe.peers.resolver import Resolver


_LENGTH = re.compile(r"[0-9]{1,18}")
"""A body's length: digits that a number of 64 bits has."""


class RequestRejected(Exception):
    """The current request is refused."""

    def __init__(self, reason: Rejection) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Call:
    """A request, and what has been proved about it."""

    claim: RequestClaim = field(default_factory=lambda: RequestClaim("", ""))
    """What the request claims about itself; empty until its header has been read."""
    proved: bool = False
    """Whether the request comes from the sender that it claims."""
    key: bytes | None = None
    """The key that the request was signed with; the answer is signed with it too."""


class Guard:
    """Authenticates requests and counts those that it refuses."""

    def __init__(
        self,
        options: PeerOptions,
        me: str,
        members: Callable[[], Collection[str]],
        credentials: Credentials,
        monotonic: Callable[[], float],
        resolver: Resolver | None = None,
    ) -> None:
        """Let those that `members` names call the node `me`; `resolver` checks their addresses."""
        self._options = options
        self._me = me
        self._members = members
        self._credentials = credentials
        # A certificate names its node; anyone with the shared key could sign as any node.
        self._resolver = resolver if options.check_addresses and not options.tls else None
        self._nonces = Nonces(options.calls_per_second, options.burst, monotonic)
        self.refused: Counter[Rejection] = Counter(dict.fromkeys(Rejection, 0))

    async def body(
        self, request: BaseRequest, connection: PeerConnection, call: Call
    ) -> bytes | None:
        """Return an accepted body; None if it requests a nonce. Raises RequestRejected."""
        length = content_length(request)
        authorization = request.headers.getall("Authorization", ())
        claim = RequestClaim.parse(authorization[0]) if len(authorization) == 1 else None
        # Before the body is read: a request without a claim costs only a header.
        if claim is None:
            raise RequestRejected(Rejection.NO_CREDENTIALS)
        if length > MAX_BODY:
            raise RequestRejected(Rejection.TOO_LARGE)
        body = await self._read(request)
        call.claim = claim
        if request.raw_path == PREFIX + NONCE:
            if self._options.key_file is None or body or not connection.doubt():
                raise RequestRejected(Rejection.MALFORMED)
            return None
        if self._options.tls and self._options.certificate_name(
            claim.sender
        ) not in certificate_names(connection.certificate):
            raise RequestRejected(Rejection.CERTIFICATE)
        secrets = await self._credentials.current()
        if self._options.key_file is not None:
            call.key = self._key(request.raw_path, body, claim, secrets.keys)
        # From here on refusals are signed and leave the connection open.
        call.proved = True
        connection.prove()
        self._admit(claim)
        if self._resolver is not None and not await self._is_at(
            self._resolver, claim.sender, connection.address
        ):
            raise RequestRejected(Rejection.ADDRESS)
        return body

    def signature(self, call: Call, code: int, body: bytes) -> str | None:
        """Return the header value that signs an answer, with the next nonce. None if there is no
        key or no caller.
        """
        if not call.claim.sender or self._options.key_file is None:
            return None
        nonce = self._nonces.issue(call.claim.sender)
        key = call.key
        mac = ABSENT if key is None else answer_mac(key, call.claim.mac, code, body, nonce)
        return f"{nonce} {mac}"

    def _key(self, path: str, body: bytes, claim: RequestClaim, keys: tuple[bytes, ...]) -> bytes:
        fitting = [
            key
            for key in keys
            if hmac.compare_digest(request_mac(key, path, body, claim), claim.mac)
        ]
        if not fitting or claim.challenge == ABSENT:
            raise RequestRejected(Rejection.KEY)
        # After the MAC: a stranger must neither learn whether a nonce is good nor spend it.
        if not self._nonces.fresh(claim.nonce, claim.sender):
            raise RequestRejected(Rejection.STALE)
        if not self._nonces.spend(claim.nonce, claim.sender):
            raise RequestRejected(Rejection.REPLAYED)
        return fitting[0]

    def _admit(self, claim: RequestClaim) -> None:
        if claim.receiver != self._me:
            raise RequestRejected(Rejection.RECEIVER)
        if claim.sender == self._me:
            raise RequestRejected(Rejection.SELF)
        if claim.sender not in self._members():
            raise RequestRejected(Rejection.SENDER)
        if not self._nonces.admit(claim.sender):
            raise RequestRejected(Rejection.RATE)
        if self._credentials.off:
            raise RequestRejected(Rejection.OFF)

    async def _is_at(self, resolver: Resolver, sender: str, address: str) -> bool:
        """Return whether a member's name resolves to the address that its call comes from. False if
        the name cannot be looked up: that member could not be called either.
        """
        try:
            async with time_limit(self._options.header_timeout):
                known = await resolver.addresses(sender)
        except (LookupFailed, TimeoutError):
            return False
        return bool(address) and plain(address) in {plain(other) for _, other in known}

    async def _read(self, request: BaseRequest) -> bytes:
        try:
            async with time_limit(self._options.header_timeout):
                return await request.read()
        except TimeoutError as error:
            raise RequestRejected(Rejection.SLOW) from error
        except HTTPRequestEntityTooLarge as error:
            raise RequestRejected(Rejection.TOO_LARGE) from error
        except (RequestPayloadError, HttpProcessingError) as error:
            raise RequestRejected(Rejection.MALFORMED) from error


def plain(address: str) -> str:
    """Return a caller's address in canonical form: without a zone, mapped IPv4 as plain IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def content_length(request: BaseRequest) -> int:
    """Return the length of a body; refuse a request that is ambiguous or needs decoding."""
    lengths = request.headers.getall("Content-Length", ())
    if any(
        name in request.headers
        for name in ("Transfer-Encoding", "Content-Encoding", "Upgrade", "Expect")
    ):
        raise RequestRejected(Rejection.MALFORMED)
    if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        raise RequestRejected(Rejection.MALFORMED)
    return int(lengths[0])
