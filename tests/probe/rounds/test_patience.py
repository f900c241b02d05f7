"""How long two agents wait for each other, on a clock that goes on where nothing else does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dshealthd.probe.observation import Backend, Outcome, RoundKind, RoundPlan, RoundResult, Stage
from dshealthd.probe.rounds import leader, member
from dshealthd.probe.rounds.active_round import ActiveRound
from dshealthd.probe.workers.job import RankResult
from tests.probe.peering import at_once

PLAN = RoundPlan(epoch=0, kind=RoundKind.PAIR, backend=Backend.GLOO, members=("a", "b"), digest="")


class Node:
    """A node whose workers end well, and whose peer answers and does no more."""

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name, self._seconds = name, seconds
        self.peers = None
        self.called: list[tuple[str, float]] = []
        """The methods, and when."""

    def monotonic(self) -> float:
        """Return the time of its loop, since the scene began."""
        return asyncio.get_running_loop().time()

    wall = monotonic

    def report(self) -> None:
        """Report nothing."""

    async def work(self, *_: object) -> tuple[RankResult, ...]:
        """Take some time."""
        await asyncio.sleep(self._seconds)
        return (RankResult(rank=0, outcome=Outcome.OK, stage=Stage.DONE),)

    async def query(self, _peer: str, method: str, _body: object) -> dict[str, Any]:
        """Answer anything."""
        self.called.append((method, self.monotonic()))
        return {"report": None, "clock": 0.0}

    async def absent(self, _peer: str, deadline: float) -> None:
        """Answer an echo."""
        assert deadline == 1.0
        await self.query(_peer, "echo", None)


def waited(of: Any, node: Any, plan: RoundPlan = PLAN) -> float:
    """Return after which time a node calls the other one silent."""

    async def scene() -> RoundResult:
        found: RoundResult = await of(node, ActiveRound(plan, 0.0, led=node.name == "a"))
        return found

    found, seconds = at_once(scene())
    other = "b" if node.name == "a" else "a"
    assert (found.outcome, found.late, found.reason) == (Outcome.HUNG, (other,), "silent")
    return seconds


def test_a_root_that_says_nothing() -> None:
    """A member sends its share again every three seconds, for a minute. Of a light round it waits
    twenty seconds for the end.
    """
    node = Node("b")
    assert waited(member.take_part, node) == pytest.approx(63.0)
    assert [at for _, at in node.called] == pytest.approx([3.0 * turn for turn in range(21)])
    assert waited(member.await_light, node, PLAN.light()) == pytest.approx(20.0, abs=0.1)


@pytest.mark.parametrize(("seconds", "echoes"), [(0.0, [1.0]), (2.5, [1.0, 2.0, 3.5])])
def test_a_member_without_a_share(seconds: float, echoes: list[float]) -> None:
    """A root looks every second whether it is there, and waits four more for its share."""
    node = Node("a", seconds)
    assert waited(leader.lead, node) == pytest.approx(seconds + 5.0, abs=0.1)
    found = [at for method, at in node.called if method == "echo"]
    assert found == pytest.approx(echoes, abs=0.1)
