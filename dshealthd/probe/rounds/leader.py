"""The leader (root) of a round: invites the member, runs the round, and says when it is over.

The member believes it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dshealthd.core.timing import happens
from dshealthd.probe.observation import Outcome, RoundKind, RoundResult, Stage
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds.active_round import DISAGREEMENTS, ActiveRound, Decline
from dshealthd.probe.rounds.conclusion import (
    SILENT,
    combine,
    conclude_without,
    merge,
    unless_starved,
)
from dshealthd.probe.rounds.light import measure

if TYPE_CHECKING:
    from dshealthd.probe.node import ThisNode

log = logging.getLogger(__name__)

SHARE = 4.0
"""Seconds that the root waits for the member's share after its own workers have ended."""
FIRST = 1.0
"""Seconds after which the root checks that a silent member is alive, and the interval at which it
repeats the check.
"""
PRESENCE = 1.0
"""Seconds for a silent member to answer an echo."""


async def lead(node: ThisNode, active: ActiveRound) -> RoundResult:
    """Lead a round and return its result, which counts for nothing if it has given way."""
    active.inviting = True
    error = await _invite(node, active)
    active.inviting = False
    if active.has_given_way:
        return RoundResult(Outcome.DECLINED, Stage.INVITE, reason=Decline.TESTING)
    if error is not None and error.outcome is not Outcome.DECLINED:
        return conclude_without(active.peer, error, Stage.INVITE)
    if error is not None:
        if error.reason in DISAGREEMENTS:
            await _light(node, active)  # by how much the clocks differ
        active.plan = active.plan.light()
        return RoundResult(Outcome.DECLINED, Stage.INVITE, (), (active.peer,), error.reason)
    light = active.plan.kind is RoundKind.LIGHT
    result = await (_light if light else _full)(node, active)
    # Before the member is told: a root starved of CPU sees silence everywhere.
    result = unless_starved(result, starved=active.lag.starved)
    await _send_conclusion(node, active, result)
    return result


async def _invite(node: ThisNode, active: ActiveRound) -> PeerError | None:
    """Invite the member; return the error if it is not ready. Measure its clock."""
    invitation = {"plan": active.plan, "report": node.report()}
    sent_at, sent = node.wall(), node.monotonic()
    answer = await node.query(active.peer, "invite", invitation)
    if isinstance(answer, PeerError):
        return answer
    active.report = answer["report"]
    # As in NTP: assume that the clock was read half-way between call and answer. The monotonic
    # clock times the trip, as the wall clock may be set meanwhile.
    active.offset = answer["clock"] - (sent_at + (node.monotonic() - sent) / 2)
    return None


async def _light(node: ThisNode, active: ActiveRound) -> RoundResult:
    try:
        echoes = await measure(node, active.peer)
    except PeerError as error:
        return conclude_without(active.peer, error, Stage.SIZES)
    active.offset = echoes.offset
    return RoundResult(Outcome.OK, Stage.DONE, echoes.timings, (), active.reason)


async def _full(node: ThisNode, active: ActiveRound) -> RoundResult:
    me = node.name
    error = await _lead_workers(node, active)
    if error is not None:
        return conclude_without(active.peer, error, active.stage)
    if not await happens(active.arrived, FIRST):
        # Do not wait for a member whose agent has stopped answering.
        error = await node.absent(active.peer, PRESENCE)
        # If this node has found itself at fault, the member is waiting for it, and learns of it
        # from the conclusion.
        if error is None and not active.decided and not await happens(active.arrived, SHARE):
            error = PeerError(Outcome.HUNG, SILENT)
    return combine(active.plan, me, active.shares, error)


async def _lead_workers(node: ThisNode, active: ActiveRound) -> PeerError | None:
    """Run this node's workers until they end, the member finds itself at fault, or its agent is
    gone. Return the error then: no workers will meet, and this node is free for another round.
    """
    working = asyncio.create_task(
        node.work(active, active.store), name=f"workers of round {active.plan.round}"
    )
    arrival = asyncio.create_task(active.arrived.wait())
    pending: set[asyncio.Task[Any]] = {working, arrival}
    try:
        while working in pending and not active.decided:
            ended, pending = await asyncio.wait(
                pending, timeout=FIRST, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended and arrival in pending:
                error = await node.absent(active.peer, PRESENCE)
                # Silence may be a lost packet; a refused connection means that no agent runs.
                if error is not None and error.outcome is Outcome.REFUSED:
                    return error
        await asyncio.wait({working}, timeout=FIRST)
        if working.done():
            active.shares[node.name] = working.result()
        return None
    finally:
        for task in (working, arrival):
            task.cancel()
        await asyncio.gather(working, arrival, return_exceptions=True)


async def _send_conclusion(node: ThisNode, active: ActiveRound, result: RoundResult) -> None:
    if result.outcome is Outcome.OK and active.shares:  # also of parts that only the member has
        timings = merge(rank for share in active.shares.values() for rank in share)
        result = replace(result, timings=timings)
    body: dict[str, Any] = {"round": active.plan.round, "result": result}
    if active.offset is not None:
        body["offset"] = active.offset
    answer = await node.query(active.peer, "conclusion", body)
    if isinstance(answer, PeerError) and answer.reason != Decline.ROUND:
        log.debug(
            "round %s: %s did not accept its conclusion: %s", active.plan.round, active.peer, answer
        )
