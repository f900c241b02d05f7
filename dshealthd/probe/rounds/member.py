"""The member's part in a round that another node leads.

Runs its workers, sends their results to the root, and believes its conclusion.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dshealthd.core.timing import time_limit
from dshealthd.probe.observation import Outcome, RoundKind, RoundResult, Stage
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds.conclusion import SILENT, combine, merge, own_timings
from dshealthd.probe.workers.store import RemoteStore

if TYPE_CHECKING:
    from dshealthd.probe.node import ThisNode
    from dshealthd.probe.rounds.active_round import ActiveRound

ROUND = 60.0
"""Seconds after which the root counts as silent; each stage has a shorter deadline."""
LIGHT_ROUND = 20.0
"""The same in a light round."""
REPEAT = 3.0
"""Seconds after which a member that waits for the conclusion sends its share again."""


async def take_part(node: ThisNode, active: ActiveRound) -> RoundResult:
    """Run this node's workers, send the root their results, and return the conclusion."""
    me, plan = node.name, active.plan
    store = RemoteStore(node.peers, plan.root, plan.round, node.monotonic)
    working = asyncio.create_task(node.work(active, store), name=f"workers of round {plan.round}")
    try:
        both: set[asyncio.Future[Any]] = {working, active.told}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            active.shares[me] = working.result()
            error = await _hand_in(node, active)
            if error is not None:
                outcome = Outcome.HUNG if error.outcome is Outcome.DECLINED else error.outcome
                return combine(plan, me, active.shares, PeerError(outcome, error.reason))
        return _conclude(me, active)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def await_light(node: ThisNode, active: ActiveRound) -> RoundResult:
    """Wait, as a member, for a light round's end; its echoes are answered like any others."""
    try:
        async with time_limit(LIGHT_ROUND):
            await asyncio.shield(active.told)
    except TimeoutError:
        return RoundResult(Outcome.HUNG, Stage.SIZES, (), (active.plan.root,), SILENT)
    return _conclude(node.name, active)


async def _hand_in(node: ThisNode, active: ActiveRound) -> PeerError | None:
    """Send this node's share to the root until it says that the round is over. Repeat it, because
    the root may be gone or may have restarted. Return the error if it does not answer.
    """
    ranks = active.shares[node.name]
    share = {"round": active.plan.round, "ranks": ranks, "timings": merge(ranks)}
    end = node.monotonic() + ROUND
    while not active.told.done():
        answer = await node.query(active.plan.root, "result", share)
        if active.told.done():
            break
        if isinstance(answer, PeerError):
            return answer
        await asyncio.wait({active.told}, timeout=REPEAT)
        if node.monotonic() > end:
            return PeerError(Outcome.HUNG, SILENT)
    return None


def _conclude(me: str, active: ActiveRound) -> RoundResult:
    """Return the root's conclusion of the round, as its member takes it."""
    told = active.told.result()
    active.offset = -told["offset"] if "offset" in told else None
    result: RoundResult = told["result"]
    late = tuple(name for name in result.late if name in active.plan.members)
    if active.plan.kind is RoundKind.LIGHT:
        return replace(result, late=late)
    return replace(
        result, late=late, timings=own_timings(result.timings, active.shares.get(me, ()))
    )
