"""The leader (root) of a round: invites all members, runs it, and tells them that it is over.

Each member draws its own conclusion.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

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
    without,
)
from dshealthd.probe.rounds.plan import ON_DEMAND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dshealthd.probe.rounds.active_round import ActiveRound, RoundContext
    from dshealthd.probe.rounds.plan import RoundPlan

log = logging.getLogger(__name__)

INVITATION = 2.0
"""Seconds for the answer to an invitation."""
SHARE = 4.0
"""Seconds that the root waits for the others' shares after its own workers have ended."""
CROSSING = 0.2
"""Seconds to wait for the invitation of a member that has refused this node's and may be starting
the same group's round itself.
"""
FIRST = 1.0
"""Seconds after which the root checks that silent members are alive, and the interval at which it
repeats the check.
"""
PRESENCE = 1.0
"""Seconds for a silent member to answer an echo."""
CONCLUSION = 2.0
"""Seconds for a member to acknowledge the conclusion."""


class Superseded(Exception):
    """Another member leads the same group's round."""

    def __init__(self, successor: ActiveRound) -> None:
        super().__init__()
        self.successor = successor


class Leader:
    """Leads rounds."""

    def __init__(self, context: RoundContext) -> None:
        """Lead rounds with the context of this node."""
        self._context = context

    async def lead(self, active: ActiveRound) -> tuple[RoundResult, Mapping[str, float]]:
        """Return the result, and by how many seconds others' clocks are ahead, or Superseded."""
        plan = active.plan
        others = plan.others(self._context.node.name)
        invitation = {
            **plan.invitation(),
            "scores": score_fields(active.scores[self._context.node.name]),
        }
        offsets: dict[str, float] = {}
        # A task of its own, so that `Rounds` can cancel only this when a member that comes first in
        # the order has begun the same round.
        active.inviting = asyncio.create_task(self._invite_all(plan, invitation, offsets))
        try:
            answers = await active.inviting
        except asyncio.CancelledError:
            if active.successor is not None:
                raise Superseded(active.successor) from None
            active.inviting.cancel()
            raise
        active.inviting = None
        errors = {name: answer for name, answer in answers.items() if isinstance(answer, PeerError)}
        for name, answer in answers.items():
            if not isinstance(answer, PeerError):
                active.scores[name] = scores_of(answer, name)
        gone = {
            name: error for name, error in errors.items() if error.outcome is not Outcome.DECLINED
        }
        if gone:
            findings = without(_said(gone), Stage.INVITE)
        elif plan.kind is Kind.LIGHT or errors:
            findings, measured = await self._light(active, errors)
            offsets.update(measured)
        else:
            findings = await self._full(active)
        # Before members are told: a root starved of CPU sees silence everywhere.
        findings = findings.unless_starved(starved=active.lag.starved)
        await self._tell(active, findings, offsets, [name for name in others if name not in gone])
        return findings, offsets

    async def _light(
        self, active: ActiveRound, errors: Mapping[str, PeerError]
    ) -> tuple[RoundResult, Mapping[str, float]]:
        declined = [error.reason for error in errors.values()]
        whole = next((reason for reason in declined if reason in WHOLE), "")
        if active.plan.kind is not Kind.LIGHT:
            active.plan = active.plan.light()
            active.reason = whole or declined[0]
        if whole == Decline.TESTING:
            return RoundResult(Outcome.DECLINED, Stage.INVITE, (), tuple(sorted(errors)), whole), {}
        active.stage = Stage.SIZES
        others = active.plan.others(self._context.node.name)
        found = await asyncio.gather(*(self._measure(name) for name in others))
        bad = {
            name: answer
            for name, answer in zip(others, found, strict=True)
            if isinstance(answer, PeerError)
        }
        echoes = {
            name: answer
            for name, answer in zip(others, found, strict=True)
            if isinstance(answer, light.Echoes)
        }
        offsets = {name: echo.offset for name, echo in echoes.items()}
        worst = max(echoes.values(), key=lambda echo: echo.round_trip, default=None)
        timings, bounds = ((), ()) if worst is None else (worst.timings, worst.bounds)
        if bad:
            return without(_said(bad), Stage.SIZES), offsets
        if whole:
            return RoundResult(
                Outcome.DECLINED, Stage.INVITE, timings, tuple(sorted(errors)), whole
            ), offsets
        return RoundResult(Outcome.OK, Stage.DONE, timings, (), active.reason, bounds), offsets

    async def _measure(self, name: str) -> light.Echoes | PeerError:
        try:
            return await light.measure(
                self._context.peers,
                name,
                self._context.monotonic,
                self._context.wall,
                self._context.waited,
            )
        except PeerError as error:
            return error

    async def _full(self, active: ActiveRound) -> RoundResult:
        me = self._context.node.name
        others = active.plan.others(me)
        gone = await self._work_until_decided(active, others)
        if gone:
            return without(_said(gone), active.stage)
        missing = await active.missing(others, FIRST)
        silent: dict[str, tuple[Outcome, str]] = {}
        if missing:
            # Do not wait for members whose agents have stopped answering.
            silent = _said(await self._context.absent(missing, PRESENCE))
            waited = [name for name in missing if name not in silent]
            # If one member has found itself at fault, the silent ones are waiting for it; they
            # learn of it from the conclusion.
            for name in [] if active.decided else await active.missing(waited, SHARE):
                silent[name] = Outcome.HUNG, SILENT
        for name, share in active.shares.items():
            active.scores[name] = share.scores or active.scores.get(name, ())
        active.scores[me] = self._context.node.scores()
        return combine(active.plan, me, active.shares, silent)

    async def _work_until_decided(
        self, active: ActiveRound, others: Sequence[str]
    ) -> Mapping[str, PeerError]:
        """Run this node's workers as leader until they end, a member finds itself at fault, or a
        member's agent is gone. Return the members whose agents are gone: then no workers will meet,
        and the others are free for another round.
        """
        working = asyncio.create_task(
            self._context.work(active, active.store), name=f"workers of round {active.plan.round}"
        )
        gone: Mapping[str, PeerError] = {}
        try:
            while not working.done() and not active.decided and not gone:
                active.arrived.clear()
                arrival = asyncio.create_task(active.arrived.wait())
                ended, _ = await asyncio.wait(
                    {working, arrival}, timeout=FIRST, return_when=asyncio.FIRST_COMPLETED
                )
                arrival.cancel()
                if not ended:
                    absent = await self._context.absent(
                        [name for name in others if name not in active.shares], PRESENCE
                    )
                    # Silence may be a lost packet; a refused connection means that no agent runs.
                    gone = {
                        name: error
                        for name, error in absent.items()
                        if error.outcome is Outcome.REFUSED
                    }
            if not gone:
                await asyncio.wait({working}, timeout=FIRST)
            if working.done():
                active.shares[self._context.node.name] = MemberResult(working.result())
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        return gone

    async def _tell(
        self,
        active: ActiveRound,
        findings: RoundResult,
        offsets: Mapping[str, float],
        names: Sequence[str],
    ) -> None:
        me = self._context.node.name
        own = MemberResult(
            active.shares[me].ranks if me in active.shares else (), active.scores.get(me, ())
        )
        body = {
            "round": active.plan.round,
            "kind": active.plan.kind,
            "outcome": findings.outcome,
            "stage": findings.stage,
            "late": findings.late,
            "reason": findings.reason,
            **own.message(),
        }
        calls = [
            self._context.ask(
                name,
                "conclusion",
                {**body, "offset": offsets[name]} if name in offsets else body,
                CONCLUSION,
            )
            for name in names
        ]
        for name, answer in zip(names, await asyncio.gather(*calls), strict=True):
            if isinstance(answer, PeerError) and answer.reason != Decline.ROUND:
                log.debug(
                    "round %s: %s did not accept its conclusion: %s",
                    active.plan.round,
                    name,
                    answer,
                )

    async def _invite_all(
        self, plan: RoundPlan, invitation: Mapping[str, Any], offsets: dict[str, float]
    ) -> dict[str, dict[str, Any] | PeerError]:
        """Return the answers to the leader's invitation. Fill `offsets` with the seconds by which
        the clocks of ready members are ahead. A member that comes earlier in the epoch's order and
        says that it is testing may have begun this same round, so wait a moment for its invitation.
        """
        me = self._context.node.name

        async def invite(name: str) -> dict[str, Any] | PeerError:
            sent_at, sent = self._context.wall(), self._context.monotonic()
            answer = await self._context.ask(name, "invite", invitation, INVITATION)
            if not isinstance(answer, PeerError) and "clock" in answer:
                # As in NTP: assume that the clock was read half-way between call and answer. The
                # monotonic clock times the trip, as the wall clock may be set meanwhile.
                offsets[name] = answer["clock"] - (sent_at + (self._context.monotonic() - sent) / 2)
            return answer

        others = plan.others(me)
        answers = dict(zip(others, await asyncio.gather(*map(invite, others)), strict=True))
        order = root_order(plan.members, plan.epoch)
        if plan.epoch != ON_DEMAND and any(
            _is_testing(answers[name]) for name in order[: order.index(me)]
        ):
            await asyncio.sleep(CROSSING)
        return answers


def _said(errors: Mapping[str, PeerError]) -> dict[str, tuple[Outcome, str]]:
    return {name: (error.outcome, error.reason) for name, error in errors.items()}


def _is_testing(answer: dict[str, Any] | PeerError) -> bool:
    return isinstance(answer, PeerError) and answer.reason == Decline.TESTING
