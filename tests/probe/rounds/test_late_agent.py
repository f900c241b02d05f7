"""An agent that was stopped itself accuses no member of silence whose answer is there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dshealthd.probe.rounds.active_round import ActiveRound
from tests.probe.peering import may_block
from tests.suspension import Suspension, turns

if TYPE_CHECKING:
    import pytest


@may_block
async def test_shares_that_are_read_only_after_the_deadline_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the root nor a member misses the share of one that sent it in time."""
    suspension, loop = Suspension(monkeypatch), asyncio.get_running_loop()
    active: Any = SimpleNamespace(shares={}, arrived=asyncio.Event())
    waiting = asyncio.ensure_future(ActiveRound.missing(active, ["b", "c"], 600.0))
    await turns()

    def arrive(name: str) -> None:
        active.shares[name] = object()
        active.arrived.set()

    # Two turns of the loop apart, as two requests are.
    loop.call_soon(arrive, "b")
    loop.call_soon(lambda: loop.call_soon(loop.call_soon, arrive, "c"))
    suspension.resume(601.0)
    assert await waiting == []
