"""An agent that was stopped itself accuses no member of silence whose answer is there."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dshealthd.probe.rounds import member
from dshealthd.probe.rounds.active_round import ActiveRound
from dshealthd.probe.rounds.member import Participant
from tests.probe.peering import may_block
from tests.suspension import Suspension, turns

if TYPE_CHECKING:
    import pytest

SECONDS = 0.05


async def test_a_share_that_came_while_the_root_was_stopped_has_come() -> None:
    """The root finds the share and the end of its patience in the same turn of the loop."""
    active: Any = SimpleNamespace(shares={}, arrived=asyncio.Event())

    loop = asyncio.get_running_loop()

    def arrive() -> None:
        active.shares["b"] = object()
        active.arrived.set()

    def stop() -> None:
        loop.call_soon(arrive)
        time.sleep(2 * SECONDS)

    loop.call_soon(stop)
    assert await ActiveRound.missing(active, ["b"], SECONDS) == []
    assert await ActiveRound.missing(active, ["b", "c"], SECONDS) == ["c"]


async def test_a_light_round_whose_end_was_told_while_the_member_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The root has told its members: it is not silent."""
    monkeypatch.setattr(member, "LIGHT_ROUND", SECONDS)
    told = asyncio.get_running_loop().create_future()
    plan = SimpleNamespace(root="a")
    plan.light = lambda: plan
    active: Any = SimpleNamespace(plan=plan, told=told)
    context: Any = SimpleNamespace()
    concluded: Any = object()

    async def conclude(_active: Any) -> Any:
        return concluded

    one = Participant(context)
    monkeypatch.setattr(one, "_conclude", conclude)

    def stop() -> None:
        told.set_result(None)
        time.sleep(2 * SECONDS)

    asyncio.get_running_loop().call_soon(stop)
    assert await one.await_light(active) is concluded


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
