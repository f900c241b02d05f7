"""The leader (root) of a round: invites all members, runs it, and tells them that it is over.

What it comes to each member finds out itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from dshealthd.core.deadline import time_limit
from dshealthd.probe.members.schedule import root_order
from dshealthd.probe.observation import Kind, Outcome, Stage
from dshealthd.probe.peers.contract import PeerError
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
"""Seconds after its own workers have ended that the root waits for what the others' gave."""
CROSSING = 0.2
"""Seconds for the invitation of a member that begins the same group's round at this moment, and has
refused this node's.
"""
FIRST = 1.0
"""Seconds after which it asks those that have sent nothing whether they are there, and again after
each further one.
"""
PRESENCE = 1.0
"""Seconds for a member that is silent to answer an echo."""
CONCLUSION = 2.0
"""Seconds for a member to take the conclusion."""


class Superseded(Exception):
    """Another member leads the same group's round."""

    def __init__(self, successor: ActiveRound) -> None:
        super().__init__()
        self.successor = successor


class Leader:
    """Leads rounds."""

    def __init__(self, context: RoundContext) -> None:
        """Lead with what this node has."""
        self._context = context

    async def lead(self, active: ActiveRound) -> tuple[RoundResult, Mapping[str, float]]:
        """Lead the round: return what it comes to, and by how many seconds others' clocks are
        ahead.

        Raises Superseded.
        """
        plan = active.plan
        others = plan.others(self._context.node.name)
        invitation = {
            **plan.invitation(),
            "scores": score_fields(active.scores[self._context.node.name]),
        }
        offsets: dict[str, float] = {}
        # A task of its own: where a member that comes first in the order has begun the same round,
        # `Rounds` cancels it and nothing else.
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
        # Before anybody is told: a root without a CPU sees silence everywhere.
        findings = findings.unless_starved(starved=active.lag.starved)
        await self._tell(active, findings, offsets, [name for name in others if name not in gone])
        return findings, offsets

    async def _light(
        self, active: ActiveRound, errors: Mapping[str, PeerError]
    ) -> tuple[RoundResult, Mapping[str, float]]:
        """Measure, as leader, every member that is there by echoes."""
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
        worst = max(echoes.values(), key=lambda echo: echo.round_trip or (0.0,), default=None)
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
        """Run this node's workers and take the others' shares, as the leader does."""
        me = self._context.node.name
        others = active.plan.others(me)
        gone = await self._work_until_decided(active, others)
        if gone:
            return without(_said(gone), active.stage)
        missing = await self._wait_for_shares(active, others, FIRST)
        silent: dict[str, tuple[Outcome, str]] = {}
        if missing:
            # Whose agent does not answer any more is not waited for.
            silent = _said(await self._absent(missing))
            waited = [name for name in missing if name not in silent]
            # Where one has found itself at fault, who says nothing yet is waiting for that one, and
            # learns it from the conclusion.
            for name in (
                [] if active.decided else await self._wait_for_shares(active, waited, SHARE)
            ):
                silent[name] = Outcome.HUNG, SILENT
        for name, share in active.shares.items():
            active.scores[name] = share.scores or active.scores.get(name, ())
        active.scores[me] = self._context.node.scores()
        return combine(active.plan, me, active.shares, silent)

    async def _work_until_decided(
        self, active: ActiveRound, others: Sequence[str]
    ) -> Mapping[str, PeerError]:
        """Run this node's workers as leader, but not on and on for a member that has found itself
        at fault, or is gone, and will not come.

        Return whose agent is gone: by then nobody's workers will meet, and who waits for them can
        have another round.
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
                    absent = await self._absent(
                        [name for name in others if name not in active.shares]
                    )
                    # Silence may be a packet that was lost; who refuses has no agent.
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

    async def _absent(self, names: Sequence[str]) -> Mapping[str, PeerError]:
        """Return whose agents do not answer the leader's echo, and why."""
        here = await asyncio.gather(*(self._present(name) for name in names))
        return {name: error for name, error in zip(names, here, strict=True) if error is not None}

    async def _present(self, name: str) -> PeerError | None:
        try:
            await self._context.peers.call(
                name, "echo", {"clock": self._context.wall(), "payload": b""}, PRESENCE
            )
        except PeerError as error:
            return error
        return None

    @staticmethod
    async def _wait_for_shares(
        active: ActiveRound, names: Sequence[str], seconds: float
    ) -> list[str]:
        """Return whose share has not come to the leader."""

        def missing() -> list[str]:
            return [name for name in names if name not in active.shares]

        with contextlib.suppress(TimeoutError):
            async with time_limit(seconds):
                while missing():
                    active.arrived.clear()
                    await active.arrived.wait()
        return missing()  # a share may have come in the same turn of the loop as the timeout

    async def _tell(
        self,
        active: ActiveRound,
        findings: RoundResult,
        offsets: Mapping[str, float],
        names: Sequence[str],
    ) -> None:
        """Tell the members that are there that the leader's round is over, and what this node's
        workers gave.
        """
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
                    "round %s: %s did not take its conclusion: %s", active.plan.round, name, answer
                )

    async def _invite_all(
        self, plan: RoundPlan, invitation: Mapping[str, Any], offsets: dict[str, float]
    ) -> dict[str, dict[str, Any] | PeerError]:
        """Return the answers to the leader's invitation.

        `offsets` takes how far the clocks of those that are ready are ahead.

        Who comes first in the order of an epoch and is in another round may have begun this one,
        and its invitation be on its way.
        """
        me = self._context.node.name

        async def invite(name: str) -> dict[str, Any] | PeerError:
            sent_at, sent = self._context.wall(), self._context.monotonic()
            answer = await self._context.ask(name, "invite", invitation, INVITATION)
            if not isinstance(answer, PeerError) and "clock" in answer:
                # As in NTP: the clock was read half-way between call and answer. The way is
                # measured by the monotonic clock, as the wall clock may be set meanwhile.
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
