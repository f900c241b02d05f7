"""A request that came while the agent was stopped came in time."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from dshealthd.core import timing
from dshealthd.probe.peers.guard import PeerLimits
from dshealthd.probe.peers.protocol import Hello, to_frame
from tests.probe.peering import CHALLENGE, keyed, listening, may_block
from tests.waiting import eventually

HEADER_TIMEOUT = 600.0
LIMITS = PeerLimits(patience=HEADER_TIMEOUT)


class Suspension:
    """Makes the running loop's clock jump, as a suspended machine's does, and reading take long.

    Deadlines are as long as they are in earnest, so that no machine is too slow for what comes
    before the jump.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._jump = 0.0
        monkeypatch.setattr(timing, "MOMENT", 60.0)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + self._jump)

    def resume(self, seconds: float) -> None:
        """Go on after so many seconds, without a turn of the loop in between."""
        self._jump += seconds


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
            for _ in range(20):  # what can run comes to where it waits
                await asyncio.sleep(0)
            raw.send(to_frame(bytes(Hello("a", "b", CHALLENGE))))
            suspension.resume(HEADER_TIMEOUT + 1.0)
            assert len(await loop.sock_recv(raw, 100)) == 4 + 32
        assert node.metric("connections_refused_total", "header_timeout") == 0
