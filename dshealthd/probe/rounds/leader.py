"""The leader (root) of a round: invites the member, runs the round, and says when it is over.

The member draws its own conclusion.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dshealthd.core.timing import happens
from dshealthd.probe.members.schedule import root_order
from dshealthd.probe.observation import Kind, Outcome, Stage
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds import light
from dshealthd.probe.rounds.active_round import WHOLE, Decline
from dshealthd.probe.rounds.conclusion import (
    SILENT,
    MemberResult,
    RoundResult,
    combine,
    score_fields,
    scores_of,
    timing_fields,
    without,
)
from dshealthd.probe.rounds.plan import ON_DEMAND

if TYPE_CHECKING:
    from dshealthd.probe.rounds.active_round import ActiveRound, RoundContext

log = logging.getLogger(__name__)

INVITATION = 2.0
"""Seconds for the answer to an invitation."""
SHARE = 4.0
"""Seconds that the root waits for the member's share after its own workers have ended."""
CROSSING = 0.2
"""Seconds to wait for the invitation of a member that has refused this node's and may be starting
the same round itself.
"""
FIRST = 1.0
"""Seconds after which the root checks that a silent member is alive, and the interval at which it
repeats the check.
"""
PRESENCE = 1.0
"""Seconds for a silent member to answer an echo."""
CONCLUSION = 2.0
"""Seconds for the member to acknowledge the conclusion."""


class Superseded(Exception):
    """The other member leads the same round."""

    def __init__(self, successor: ActiveRound) -> None:
        super().__init__()
        self.successor = successor


async def lead(context: RoundContext, active: ActiveRound) -> RoundResult:
    """Lead a round and return its result. Raises Superseded."""
    # A task of its own, so that `Rounds` can cancel only this when a member that comes first in the
    # order has begun the same round.
    active.inviting = asyncio.create_task(_invite(context, active))
    try:
        error = await active.inviting
    except asyncio.CancelledError:
        if active.successor is not None:
            raise Superseded(active.successor) from None
        active.inviting.cancel()
        raise
    active.inviting = None
    if error is not None and error.outcome is not Outcome.DECLINED:
        return without(active.peer, error, Stage.INVITE)
    if active.plan.kind is Kind.LIGHT or error is not None:
        result = await _light(context, active, "" if error is None else error.reason)
    else:
        result = await _full(context, active)
    # Before the member is told: a root starved of CPU sees silence everywhere.
    result = result.unless_starved(starved=active.lag.starved)
    await _tell(context, active, result)
    return result


async def _invite(context: RoundContext, active: ActiveRound) -> PeerError | None:
    """Invite the member; return the error if it is not ready. Measure its clock. If it comes first
    in the epoch's order and says that it is testing, it may have begun this same round, so wait a
    moment for its invitation.
    """
    plan, me = active.plan, context.node.name
    invitation = {**plan.invitation(), "scores": score_fields(active.scores[me])}
    sent_at, sent = context.wall(), context.monotonic()
    answer = await context.ask(active.peer, "invite", invitation, INVITATION)
    if not isinstance(answer, PeerError):
        active.scores[active.peer] = scores_of(answer, active.peer)
        if "clock" in answer:
            # As in NTP: assume that the clock was read half-way between call and answer. The
            # monotonic clock times the trip, as the wall clock may be set meanwhile.
            active.offset = answer["clock"] - (sent_at + (context.monotonic() - sent) / 2)
        return None
    if (
        answer.reason == Decline.TESTING
        and plan.epoch != ON_DEMAND
        and root_order(plan.members, plan.epoch)[0] != me
    ):
        await asyncio.sleep(CROSSING)
    return answer


async def _light(context: RoundContext, active: ActiveRound, declined: str) -> RoundResult:
    """Run a light round, or the light one that replaces a round which the member has declined."""
    if active.plan.kind is not Kind.LIGHT:
        active.plan = active.plan.light()
        active.reason = declined
    late = (active.peer,)
    if declined == Decline.TESTING:
        return RoundResult(Outcome.DECLINED, Stage.INVITE, (), late, declined)
    active.stage = Stage.SIZES
    try:
        echoes = await light.measure(
            context.peers, active.peer, context.monotonic, context.wall, context.waited
        )
    except PeerError as error:
        return without(active.peer, error, Stage.SIZES)
    active.offset = echoes.offset
    if declined in WHOLE:
        return RoundResult(Outcome.DECLINED, Stage.INVITE, echoes.timings, late, declined)
    return RoundResult(Outcome.OK, Stage.DONE, echoes.timings, (), active.reason, echoes.bounds)


async def _full(context: RoundContext, active: ActiveRound) -> RoundResult:
    me = context.node.name
    error = await _work_until_decided(context, active)
    if error is not None:
        return without(active.peer, error, active.stage)
    if not await happens(active.arrived, FIRST):
        # Do not wait for a member whose agent has stopped answering.
        error = await context.absent(active.peer, PRESENCE)
        # If this node has found itself at fault, the member is waiting for it, and learns of it
        # from the conclusion.
        if error is None and not active.decided and not await happens(active.arrived, SHARE):
            error = PeerError(Outcome.HUNG, SILENT)
    active.scores[me] = context.node.scores()
    return combine(active.plan, me, active.shares, error)


async def _work_until_decided(context: RoundContext, active: ActiveRound) -> PeerError | None:
    """Run this node's workers until they end, the member finds itself at fault, or its agent is
    gone. Return the error then: no workers will meet, and this node is free for another round.
    """
    working = asyncio.create_task(
        context.work(active, active.store), name=f"workers of round {active.plan.round}"
    )
    arrival = asyncio.create_task(active.arrived.wait())
    pending: set[asyncio.Task[Any]] = {working, arrival}
    try:
        while working in pending and not active.decided:
            ended, pending = await asyncio.wait(
                pending, timeout=FIRST, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended and arrival in pending:
                error = await context.absent(active.peer, PRESENCE)
                # Silence may be a lost packet; a refused connection means that no agent runs.
                if error is not None and error.outcome is Outcome.REFUSED:
                    return error
        await asyncio.wait({working}, timeout=FIRST)
        if working.done():
            active.shares[context.node.name] = MemberResult(working.result())
        return None
    finally:
        for task in (working, arrival):
            task.cancel()
        await asyncio.gather(working, arrival, return_exceptions=True)


async def _tell(context: RoundContext, active: ActiveRound, result: RoundResult) -> None:
    me = context.node.name
    ranks = active.shares[me].ranks if me in active.shares else ()
    body = {
        "round": active.plan.round,
        "kind": active.plan.kind,
        "outcome": result.outcome,
        "stage": result.stage,
        "reason": result.reason,
        **MemberResult(ranks, active.scores.get(me, ())).message(),
        **({} if active.offset is None else {"offset": active.offset}),
    }
    if active.plan.kind is Kind.LIGHT:
        # Only the leader can time an echo, which says as much about both ends.
        body |= {
            "timings": timing_fields(result.timings),
            "bounds": [asdict(bounds) for bounds in result.bounds],
        }
    answer = await context.ask(active.peer, "conclusion", body, CONCLUSION)
    if isinstance(answer, PeerError) and answer.reason != Decline.ROUND:
        log.debug(
            "round %s: %s did not accept its conclusion: %s",
            active.plan.round,
            active.peer,
            answer,
        )
