"""An agent that was stopped itself accuses no member of silence whose answer is there."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dshealthd.probe.rounds import member
from dshealthd.probe.rounds.leader import Leader
from dshealthd.probe.rounds.member import Participant
from tests.suspension import Suspension, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

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
    assert await Leader._wait_for_shares(active, ["b"], SECONDS) == []
    assert await Leader._wait_for_shares(active, ["b", "c"], SECONDS) == ["c"]


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


def test_shares_that_are_read_only_after_the_deadline_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the root nor a member misses the share of one that sent it in time."""

    def as_root(active: Any) -> Coroutine[Any, Any, list[str]]:
        return Leader._wait_for_shares(active, ["b", "c"], 600.0)

    def as_member(active: Any) -> Coroutine[Any, Any, list[str]]:
        monkeypatch.setattr(Participant, "_others", staticmethod(lambda _active: ["b", "c"]))
        context: Any = SimpleNamespace()
        return Participant(context)._wait_for_shares(active)

    async def scene(wait: Callable[[Any], Coroutine[Any, Any, list[str]]]) -> None:
        suspension = Suspension(monkeypatch)
        active: Any = SimpleNamespace(shares={}, arrived=asyncio.Event(), decided=False)
        waiting = asyncio.ensure_future(wait(active))
        await turns()
        loop = asyncio.get_running_loop()

        def arrive(name: str) -> None:
            active.shares[name] = object()
            active.arrived.set()

        # Two turns of the loop apart, as two requests are.
        loop.call_soon(arrive, "b")
        loop.call_soon(lambda: loop.call_soon(loop.call_soon, arrive, "c"))
        suspension.resume(601.0)
        assert await waiting == []

    asyncio.run(scene(as_root))
    asyncio.run(scene(as_member))
