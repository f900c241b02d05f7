"""A request that came while the agent was stopped came in time."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from dshealthd.probe.peers.guard import PeerLimits
from dshealthd.probe.peers.protocol import Hello, to_frame
from tests.probe.peering import (
    CHALLENGE,
    PING,
    keyed,
    listening,
    may_block,
    ping,
    talking,
)
from tests.suspension import Suspension, turns
from tests.waiting import eventually

HANDLER_TIMEOUT = 25.0

HEADER_TIMEOUT = 600.0
LIMITS = PeerLimits(patience=HEADER_TIMEOUT)


@may_block
async def test_a_frame_that_came_while_the_agent_was_stopped_is_read(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is not closed for a slow frame."""
    suspension, loop = Suspension(monkeypatch), asyncio.get_running_loop()
    async with listening(keyed(key), limits=LIMITS) as node:
        with socket.socket() as raw:
            raw.settimeout(0)
            await loop.sock_connect(raw, ("127.0.0.1", node.port))
            await eventually(lambda: node.metric("connections") == 1)
            await turns()
            raw.send(to_frame(bytes(Hello("a", "b", CHALLENGE))))
            suspension.resume(HEADER_TIMEOUT + 1.0)
            assert len(await loop.sock_recv(raw, 100)) == 4 + 32
        assert node.metric("connections_refused_total", "header_timeout") == 0


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

    async with talking(keyed(key), limits=LIMITS, handlers={"echo": echo}) as (_, client):
        call = asyncio.ensure_future(ping(client, HEADER_TIMEOUT))
        await entered.wait()
        await turns()
        done.set()
        suspension.resume(HANDLER_TIMEOUT + 1.0)
        assert (await call)["payload"] == PING["payload"]
