"""The guard of the peer API: authenticates and limits requests before their messages are parsed."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.timing import time_limit
from dshealthd.probe.peers.protocol import Hello, PeerSession, Rejection, new_challenge, to_frame
from dshealthd.probe.peers.resolver import LookupFailed, Resolver

if TYPE_CHECKING:
    from dshealthd.probe.options import PeerOptions
    from dshealthd.probe.peers.connection import PeerConnection
    from dshealthd.probe.peers.credentials import Credentials

COUNTED = 5.0
"""Seconds for which the calls of each sender are counted together."""


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """What callers may take of a peer listener."""

    connections: int = 48
    """Connections served at a time; new ones replace those that have not authenticated."""
    connections_per_address: int = 8
    patience: float = 5.0
    """Seconds for a frame to arrive."""
    lookup: float = 1.0
    """Seconds to look up a caller's name: half of what it waits for an answer (`client.ANSWER`), as
    an agent that answers later counts as hung.
    """
    calls: int = 1000
    """Calls from one node in `COUNTED` seconds; a round with its rendezvous takes some dozens."""


class RequestRejected(Exception):
    """The current request is refused."""

    def __init__(self, reason: Rejection) -> None:
        super().__init__(reason)
        self.reason = reason


class Guard:
    """Authenticates requests and counts those that it refuses."""

    def __init__(
        self,
        options: PeerOptions,
        limits: PeerLimits,
        me: str,
        members: Callable[[], Collection[str]],
        credentials: Credentials,
        monotonic: Callable[[], float],
        resolver: Resolver | None = None,
    ) -> None:
        """Let those that `members` names call the node `me`; `resolver` checks their addresses."""
        self._limits = limits
        self._me = me
        self._members = members
        self._credentials = credentials
        # Anyone with the shared key could sign as any node.
        self._resolver = resolver if options.check_addresses else None
        self._monotonic = monotonic
        self._calls: Counter[str] = Counter()
        self._since = monotonic()
        self.refused: Counter[Rejection] = Counter(dict.fromkeys(Rejection, 0))

    def greet(self, connection: PeerConnection, frame: bytes) -> bytes:
        """Return the answer to a connection's first frame, a challenge that costs this node nothing
        to remember. Raises RequestRejected.
        """
        connection.hello = Hello.parse(frame)
        if connection.hello is None:
            raise RequestRejected(Rejection.NO_CREDENTIALS)
        connection.challenge = new_challenge()
        return to_frame(connection.challenge.encode())

    async def request(self, connection: PeerConnection, hello: Hello, frame: bytes) -> bytes:
        """Return an accepted request. Raises RequestRejected."""
        keys = self._credentials.current()
        content = None
        if connection.session is None:
            for session in (PeerSession(key, hello, connection.challenge) for key in keys):
                content = session.verified("request", frame)
                if content is not None:
                    connection.prove(session)
                    break
        elif connection.session.key in keys:
            content = connection.session.verified("request", frame)
        if content is None:
            raise RequestRejected(Rejection.KEY)
        self._admit(hello)
        if self._resolver is not None and not await self._is_at(
            self._resolver, hello.sender, connection.address
        ):
            raise RequestRejected(Rejection.ADDRESS)
        return content

    def _admit(self, hello: Hello) -> None:
        if hello.receiver != self._me:
            raise RequestRejected(Rejection.RECEIVER)
        if hello.sender == self._me:
            raise RequestRejected(Rejection.SELF)
        if hello.sender not in self._members():
            raise RequestRejected(Rejection.SENDER)
        now = self._monotonic()
        if now - self._since >= COUNTED:
            self._calls.clear()
            self._since = now
        self._calls[hello.sender] += 1
        if self._calls[hello.sender] > self._limits.calls:
            raise RequestRejected(Rejection.RATE)
        if self._credentials.off:
            raise RequestRejected(Rejection.OFF)

    async def _is_at(self, resolver: Resolver, sender: str, address: str) -> bool:
        """Return whether a member's name resolves to the address that its call comes from. False if
        the name cannot be looked up: that member could not be called either.
        """
        try:
            async with time_limit(self._limits.lookup):
                known = await resolver.addresses(sender)
        except (LookupFailed, TimeoutError):
            return False
        return bool(address) and plain_address(address) in {
            plain_address(other) for _, other in known
        }


def plain_address(address: str) -> str:
    """Return a caller's address in canonical form: without a zone, mapped IPv4 as plain IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
