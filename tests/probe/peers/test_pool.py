"""Which of a node's idle connections are kept, and which is used next."""

from __future__ import annotations

import errno
from typing import cast

import pytest

from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers.pool import ConnectionPool, Link, error_meaning
from dshealthd.probe.peers.protocol import Hello, PeerSession, TimeoutMeaning
from dshealthd.probe.peers.resolver import Resolver

KEY = b"k" * 32
SESSION = PeerSession(KEY, Hello("a", "b", "c" * 32), "d" * 32)


class Connected:
    """A connection without a network."""

    def __init__(self) -> None:
        self.broken = self.closed_by_peer = False
        self.idle_since = 0.0
        self.session: PeerSession | None = SESSION

    def usable(self) -> bool:
        """Tell whether it is still open."""
        return not self.closed_by_peer

    def close(self) -> None:
        """Close it."""
        self.broken = True


class Pool(ConnectionPool):
    """A pool that connects to nobody, and its clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        options = PeerOptions(listen_address="127.0.0.1:0")
        super().__init__(options, lambda name: (name, 1), Resolver(), lambda: self.now)

    async def _open(self, *_: object) -> Link:
        return cast("Link", Connected())

    async def next(self, peer: str = "a", key: bytes = KEY) -> Link:
        """Return the connection that the next call uses."""
        return await self.acquire(peer, key, TimeoutMeaning())

    async def idle(self, number: int, peer: str = "a") -> list[Link]:
        """Return so many connections to a peer, which became idle in this order."""
        made = [await self.next(peer) for _ in range(number)]
        for link in made:
            self.release(link, peer, keep=True)
        return made


async def test_the_connection_used_last_is_used_next() -> None:
    """It is the least likely to be closed by the peer; one that is closed is passed over."""
    pool = Pool()
    first, second = await pool.idle(2)
    assert await pool.next() is second
    pool.release(second, "a", keep=True)
    cast("Connected", second).closed_by_peer = True
    assert await pool.next() is first
    assert await pool.next() not in {first, second}


async def test_a_connection_of_another_key_is_not_used() -> None:
    """After the key has changed the next call begins anew, with the new one."""
    pool = Pool()
    (link,) = await pool.idle(1)
    assert await pool.next(key=b"n" * 32) is not link
    assert cast("Connected", link).broken


async def test_connections_of_a_peer_that_left_are_closed() -> None:
    """Those of others are not, nor used for another peer. Its addresses are forgotten."""
    pool = Pool()
    pool._resolver._known = {"a": (), "b": ()}
    (theirs,), (others,) = await pool.idle(1, "a"), await pool.idle(1, "b")
    pool.forget("a")
    assert list(pool._resolver._known) == ["b"]
    assert (cast("Connected", theirs).broken, cast("Connected", others).broken) == (True, False)
    assert await pool.next("a") is not others
    assert await pool.next("b") is others


@pytest.mark.parametrize(("number", "closed"), [(16, 0), (17, 1)])
async def test_few_are_kept(number: int, closed: int) -> None:
    """Of more than sixteen the one that is idle longest is closed."""
    made = await Pool().idle(number)
    assert [cast("Connected", link).broken for link in made] == [True] * closed + [False] * 16


@pytest.mark.parametrize(("seconds", "closed"), [(60.0, False), (60.1, True)])
async def test_idle_for_a_minute(seconds: float, *, closed: bool) -> None:
    """A connection is kept for less than a listener allows."""
    pool = Pool()
    (link,) = await pool.idle(1)
    pool.now += seconds
    assert (await pool.next() is not link) is closed
    assert cast("Connected", link).broken is closed


async def test_what_cannot_be_used_again_is_closed() -> None:
    """After a call that was given up or refused, and once the peer has closed it."""
    pool = Pool()
    given_up = await pool.next()
    pool.release(given_up, "a", keep=False)
    (closed,) = await pool.idle(1)
    assert len(pool) == 1
    cast("Connected", closed).closed_by_peer = True
    assert len(pool) == 0
    assert cast("Connected", given_up).broken
    assert cast("Connected", closed).broken


@pytest.mark.parametrize(("number", "outcome", "reason"), [
    (errno.ECONNREFUSED, Outcome.REFUSED, "refused"),
    (errno.ECONNABORTED, Outcome.REFUSED, "closed"),
    (errno.ECONNRESET, Outcome.REFUSED, "reset"),
    (errno.ETIMEDOUT, Outcome.UNREACHABLE, "connect_timeout"),
    (errno.EHOSTUNREACH, Outcome.UNREACHABLE, "no_route"),
    (errno.EHOSTDOWN, Outcome.UNREACHABLE, "no_route"),
    (errno.ENETUNREACH, Outcome.UNREACHABLE, "no_route"),
    (errno.ENETDOWN, Outcome.UNREACHABLE, "no_route"),
    (errno.EADDRNOTAVAIL, Outcome.UNREACHABLE, "no_route"),
    (errno.EPERM, Outcome.UNREACHABLE, "not_permitted"),
    (errno.EMFILE, Outcome.FAILED, "system_error"),
])  # fmt: skip
def test_what_an_error_means(number: int, outcome: Outcome, reason: str) -> None:
    """What the way or the other side does is not called a failure of this agent."""
    assert error_meaning(OSError(number, "why")) == (outcome, reason)
