"""A request that came while the agent was stopped came in time."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.core import timing
from dshealthd.probe.peers.guard import Guard, RequestRejected
from dshealthd.probe.peers.protocol import Rejection, RequestClaim
from dshealthd.probe.peers.server import HANDLER_TIMEOUT
from tests.probe.peering import (
    PING,
    eventually,
    keyed,
    listening,
    may_block,
    ping,
    request,
    talking,
)
from tests.suspension import Suspension, turns

if TYPE_CHECKING:
    from pathlib import Path

HEADER_TIMEOUT = 600.0


@may_block
async def test_headers_that_came_while_the_agent_was_stopped_are_read(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is not closed for slow headers."""
    suspension, loop = Suspension(monkeypatch), asyncio.get_running_loop()
    async with listening(keyed(key, header_timeout=HEADER_TIMEOUT)) as node:
        with socket.socket() as raw:
            raw.settimeout(0)
            await loop.sock_connect(raw, ("127.0.0.1", node.port))
            await eventually(lambda: node.metric("connections") == 1)
            await turns()
            raw.send(request(RequestClaim("a", "b"), b"", "/peer/v1/nonce"))
            suspension.resume(HEADER_TIMEOUT + 1.0)
            assert (await loop.sock_recv(raw, 12)) == b"HTTP/1.1 200"
        assert node.metric("connections_refused_total", "header_timeout") == 0


def guard_of(**attributes: Any) -> Guard:
    """Return a guard of which nothing but its options are used."""
    guard = Guard.__new__(Guard)
    guard._options = SimpleNamespace(header_timeout=HEADER_TIMEOUT, **attributes)  # type: ignore[assignment]
    return guard


class Answering:
    """A request, and a resolver, whose answer arrives in two turns of the loop once it is there."""

    def __init__(self) -> None:
        self.there = asyncio.Event()

    async def _arrival(self) -> None:
        await self.there.wait()
        await asyncio.sleep(0)

    async def read(self) -> bytes:
        """Return the body."""
        await self._arrival()
        return b"body"

    async def addresses(self, _name: str) -> tuple[tuple[int, str], ...]:
        """Return a member's address."""
        await self._arrival()
        return ((socket.AF_INET, "192.0.2.7"),)


@pytest.mark.parametrize("arrives", [True, False])
@may_block
async def test_a_body_that_came_while_the_agent_was_stopped_is_read(
    monkeypatch: pytest.MonkeyPatch, *, arrives: bool
) -> None:
    """Its sender is not said to be slow; one whose body does not come is."""
    suspension, body = Suspension(monkeypatch), Answering()
    reading = asyncio.ensure_future(guard_of()._read(body))  # type: ignore[arg-type]
    await turns()
    if arrives:
        body.there.set()
    else:
        monkeypatch.setattr(timing, "MOMENT", 0.0)
    suspension.resume(HEADER_TIMEOUT + 1.0)
    if arrives:
        assert await reading == b"body"
    else:
        with pytest.raises(RequestRejected) as raised:
            await reading
        assert raised.value.reason is Rejection.SLOW


@pytest.mark.parametrize("arrives", [True, False])
@may_block
async def test_a_name_that_was_looked_up_while_the_agent_was_stopped_is_known(
    monkeypatch: pytest.MonkeyPatch, *, arrives: bool
) -> None:
    """A member is not refused for its address; one whose name is not answered for is."""
    suspension, names = Suspension(monkeypatch), Answering()
    looking = asyncio.ensure_future(guard_of()._is_at(names, "a", "192.0.2.7"))  # type: ignore[arg-type]
    await turns()
    if arrives:
        names.there.set()
    else:
        monkeypatch.setattr(timing, "MOMENT", 0.0)
    suspension.resume(HEADER_TIMEOUT + 1.0)
    assert await looking is arrives


@may_block
async def test_a_handler_that_was_done_while_the_agent_was_stopped_is_done(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets its answer."""
    suspension, entered, done = Suspension(monkeypatch), asyncio.Event(), asyncio.Event()

    async def echo(_sender: str, body: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        await done.wait()
        await asyncio.sleep(0)
        return body

    async with talking(
        keyed(key, header_timeout=HEADER_TIMEOUT), keyed(key), handlers={"echo": echo}
    ) as (_, client):
        call = asyncio.ensure_future(ping(client, HEADER_TIMEOUT))
        await entered.wait()
        await turns()
        done.set()
        suspension.resume(HANDLER_TIMEOUT + 1.0)
        assert (await call)["payload"] == PING["payload"]
