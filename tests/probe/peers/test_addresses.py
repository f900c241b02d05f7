"""With one key for all nodes, a name is bound to the addresses that it has."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.timing import time_limit
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers import client, guard
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.peers.resolver import Resolver
from tests.probe.peering import KEY, PATIENT, echo, listening, run, secret
from tests.stopwatch import Stopwatch

PLACES = {"a": ["127.0.0.21"], "b": ["127.0.0.22"], "c": ["127.0.0.23", "127.0.0.24"]}
MESSAGE = {"clock": 1.5, "payload": b""}


def look_up(host: str, *_: object, **__: object) -> list[Any]:
    """Answer as `getaddrinfo` does."""
    if host not in PLACES:
        raise socket.gaierror
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0)) for place in PLACES[host]]


def call(
    tmp_path: Path,
    name: str,
    place: str,
    look_up: Callable[..., list[Any]] = look_up,
    **given: Any,
) -> str:
    """Return what a call to b comes to that is made in a name, from an address; it takes less than
    a caller waits for an answer.
    """
    key = secret(tmp_path, "key", KEY)
    result = []

    async def scene() -> None:
        options = PeerOptions(listen_address="127.0.0.22:0", key_file=key, **given)
        resolver = Resolver(look_up)
        async with listening(options, "b", handlers={"echo": echo}, resolver=resolver) as node:
            caller = PeerClient(
                PeerOptions(listen_address=f"{place}:0", key_file=key),
                name,
                lambda _: ("127.0.0.22", node.port),
            )
            watch = Stopwatch()
            try:
                await caller.call("b", "echo", MESSAGE, PATIENT)
                result.append("ok")
            except PeerError as error:
                counted = node.refused(error.reason) == 1 and error.outcome is Outcome.DECLINED
                result.append(error.reason if counted else "not declined")
            finally:
                assert watch.seconds() < client.ANSWER
                await caller.close()
                await resolver.close()

    run(scene())
    return result[0]


@pytest.mark.parametrize(("name", "place", "result"), [
    ("a", "127.0.0.21", "ok"),
    ("c", "127.0.0.23", "ok"),
    ("c", "127.0.0.24", "ok"),
    ("a", "127.0.0.23", "wrong_address"),
    ("c", "127.0.0.21", "wrong_address"),
])  # fmt: skip
def test_a_member_speaks_from_its_own_address(
    tmp_path: Path, name: str, place: str, result: str
) -> None:
    """A node that holds the key cannot speak in another one's name."""
    assert call(tmp_path, name, place) == result


def test_a_name_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot be looked up is nowhere."""
    monkeypatch.delitem(PLACES, "a")
    assert call(tmp_path, "a", "127.0.0.21") == "wrong_address"


@pytest.mark.parametrize(("seconds", "result"), [(0.3, "ok"), (4.0, "wrong_address")])
def test_a_slow_name_server_does_not_make_an_agent_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, result: str
) -> None:
    """A caller waits two seconds for an answer. If its name takes longer to look up, it is told so
    before that: an agent that did not answer would be named as hung by all that call it.
    """
    limits = []

    def limit(most: float) -> Any:
        limits.append(most)
        return time_limit(most)

    def slow(*given: Any, **more: Any) -> list[Any]:
        time.sleep(seconds)
        return look_up(*given, **more)

    monkeypatch.setattr(guard, "time_limit", limit)
    assert call(tmp_path, "a", "127.0.0.21", slow) == result
    assert limits == [1.0]


def test_addresses_that_are_translated(tmp_path: Path) -> None:
    """The check can be turned off."""
    assert call(tmp_path, "a", "127.0.0.23", check_addresses=False) == "ok"


@pytest.mark.parametrize(("address", "plain"), [
    ("10.0.0.1", "10.0.0.1"),
    ("::ffff:10.0.0.1", "10.0.0.1"),
    ("fe80::1%eth0", "fe80::1"),
    ("FD00:0::1", "fd00::1"),
])  # fmt: skip
def test_an_address_has_one_form(address: str, plain: str) -> None:
    """A caller is compared with its name's addresses whichever way its socket writes its own."""
    assert guard.plain_address(address) == plain
