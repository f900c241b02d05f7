"""Who gives way to a new connection, and who is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dshealthd.http import connection_limiter
from dshealthd.http.connection_limiter import CloseReason, ConnectionLimiter, client_of

PLACES = 2
"""Of each client."""


class Held:
    """A connection that has been in a state for some seconds."""

    def __init__(self, client: str, state: str, seconds: float) -> None:
        """`state` is the limiter's method that records it."""
        self.client, self.state, self.seconds = client, state, seconds
        self.is_evicted = False

    def evict(self) -> None:
        """Give way; its place is returned once it is closed."""
        self.is_evicted = True


A, B, NEW = "a", "b", "new"


@pytest.mark.parametrize(("held", "known", "client", "evicted"), [
    # What an unknown client has not asked for in a moment.
    ([(A, "awaits", 0.25), (B, "rest", 9.0)], B, NEW, 0),
    # Before that, the longest idle connection of a client with more than the new one.
    ([(A, "awaits", 0.24), (B, "rest", 9.0), (B, "rest", 1.0)], B, NEW, 1),
    ([(A, "rest", 9.0), (B, "rest", 8.0), (B, "rest", 1.0)], A + B, A, 1),
    # What has just come, where the new client has as many.
    ([(A, "awaits", 0.24), (B, "rest", 9.0)], B, B, 0),
    ([(A, "awaits", 0.0)], "", NEW, 0),
    # Known clients after unknown ones.
    ([(A, "awaits", 5.0), (B, "awaits", 0.1)], A, NEW, 1),
    ([(A, "awaits", 5.0), (B, "awaits", 0.1)], A + B, NEW, 0),
    # What is being answered, if it is slow.
    ([(A, "answers", 1.0), (B, "answers", 0.1)], A + B, NEW, 0),
    ([(A, "answers", 0.99)], A, NEW, None),
    # At a client's own limit, its idle connection, or the one whose request is awaited longest.
    ([(A, "awaits", 9.0), (A, "rest", 1.0), (B, "awaits", 9.0)], A, A, 1),
    ([(A, "answers", 9.0), (A, "awaits", 1.0), (B, "awaits", 9.0)], A, A, 1),
    ([(A, "answers", 9.0), (A, "answers", 9.0), (B, "awaits", 9.0)], A, A, None),
])  # fmt: skip
def test_who_gives_way(
    held: list[tuple[str, str, float]],
    known: str,
    client: str,
    evicted: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all places taken; nobody for a client that must wait, which is counted."""
    now = [0.0]
    monkeypatch.setattr(connection_limiter, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gate = ConnectionLimiter(limit=len(held), limit_per_address=PLACES)
    connections = [Held(*each) for each in held]
    for each in connections:
        now[0] = 100.0 - each.seconds
        assert gate.admit(each.client)
        getattr(gate, each.state)(each.client, each)
    now[0] = 100.0
    gate._known.clear()
    for name in known:
        gate.know(name)
    assert not gate.admit(client)  # none has been closed yet
    assert [each.is_evicted for each in connections] == [
        number == evicted for number in range(len(held))
    ]
    assert gate.refused[CloseReason.TOTAL] == 1
    assert gate.refused[CloseReason.REPLACED] == (evicted is not None)


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1:2", "fe80::1:2"),
        ("fe80::1:2%3", "fe80::1:2%3"),
    ],
)
def test_client_of_an_address(host: str, client: str) -> None:
    """A client is an IPv4 address, also a mapped one, or an IPv6 network of 64 bits. Of the
    link-local one it is the address.
    """
    assert client_of(host) == client


def test_who_may_take_the_place_of_another() -> None:
    """A known client always, another one unless sixteen connections are being closed; the last
    4,096 are known.
    """
    gate = ConnectionLimiter(limit=2, limit_per_address=1)
    for number in range(4097):
        gate.know(f"client {number}")
    for closing, may in ((15, [True, True]), (16, [False, True])):
        gate.closing = closing
        assert [gate._may_evict(client) for client in ("client 0", "client 1")] == may


def test_gate_forgets_clients_that_have_gone() -> None:
    """What the gate remembers is bounded by the connections that are open."""
    gate = ConnectionLimiter(limit=2, limit_per_address=1)
    for number in range(100):
        assert gate.admit(f"192.0.2.{number}")
        assert not gate.admit(f"192.0.2.{number}")
        gate.release(f"192.0.2.{number}")
    assert (gate.total, len(gate._open)) == (0, 0)


@pytest.mark.parametrize(("files", "limit"), [(1024, 100), (152, 100), (151, 99), (40, 1)])
def test_descriptors_that_are_kept(files: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the twenty that are open, 32 are for the collectors and their workers."""
    limits = SimpleNamespace(getrlimit=lambda _: (files, files), RLIMIT_NOFILE=0)
    monkeypatch.setattr(connection_limiter, "resource", limits)
    monkeypatch.setattr(connection_limiter, "os", SimpleNamespace(listdir=lambda _: range(20)))
    gate = ConnectionLimiter(limit=100, limit_per_address=1)
    gate.keep_descriptors()
    assert gate.limit == limit
