"""The member's part in a round that another node leads.

Runs its workers, sends their results to all other members, and draws its own conclusion.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dshealthd.core.timing import time_limit
from dshealthd.linux.starvation import STARVED
from dshealthd.probe.observation import Kind, Outcome, Stage
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds.active_round import Decline
from dshealthd.probe.rounds.conclusion import SILENT, MemberResult, RoundResult, combine
from dshealthd.probe.rounds.plan import PAIR
from dshealthd.probe.rounds.remote_store import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dshealthd.probe.rounds.active_round import ActiveRound, RoundContext

HANDING_IN = 2.0
"""Seconds for a member to acknowledge a share."""
ROUND = 60.0
"""Seconds after which the root counts as silent; each stage has a shorter deadline."""
LIGHT_ROUND = 20.0
"""The same in a light round."""
REPEAT = 3.0
"""Seconds after which a member that waits for the conclusion sends its share again."""
STRAGGLERS = 1.0
"""Seconds to wait for the other members' shares after the conclusion. All send them when their
workers end, which the root has already waited for.
"""
PRESENCE = 1.0
"""Seconds for a member that has sent no share to answer whether it is in the round."""
DISPUTED = "disputed"
"""The reason of a round where the other members do not confirm what the root says."""
_GONE = frozenset({Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.UNAUTHORIZED})


class Participant:
    """Takes part in rounds."""

    def __init__(self, context: RoundContext) -> None:
        """Take part in rounds with the context of this node."""
        self._context = context

    async def take_part(self, active: ActiveRound) -> RoundResult:
        """Run this node's workers, send the others their results, and return the conclusion."""
        me, plan = self._context.node.name, active.plan
        store = RemoteStore(self._context.peers, plan.root, plan.round, self._context.monotonic)
        working = asyncio.create_task(
            self._context.work(active, store), name=f"workers of round {plan.round}"
        )
        giving: asyncio.Task[None] | None = None
        try:
            both: set[asyncio.Future[Any]] = {working, active.told}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                active.shares[me] = MemberResult(working.result(), self._context.node.scores())
                giving = asyncio.create_task(
                    self._give(active), name=f"results of round {plan.round}"
                )
                error = await self._hand_in(active)
                if error is not None:
                    outcome = Outcome.HUNG if error.outcome is Outcome.DECLINED else error.outcome
                    return combine(plan, me, active.shares, {plan.root: (outcome, error.reason)})
            findings = await self._conclude(active)
            if giving is not None:
                # If this node left the round first, a member that is slow to take its share would
                # ask for it in vain and dispute a round that went well.
                await giving
            return findings
        finally:
            for task in (working, giving):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def await_light(self, active: ActiveRound) -> RoundResult:
        """Wait, as a member, for a light round's end; its echoes are answered like any others."""
        active.plan = active.plan.light()
        try:
            async with time_limit(LIGHT_ROUND):
                await asyncio.shield(active.told)
        except TimeoutError:
            return RoundResult(Outcome.HUNG, Stage.SIZES, (), (active.plan.root,), SILENT)
        return await self._conclude(active)

    # Giving

    async def _give(self, active: ActiveRound) -> None:
        others = [name for name in self._others(active) if name != active.plan.root]
        await self._context.errors(others, "result", self._share(active), HANDING_IN)

    async def _hand_in(self, active: ActiveRound) -> PeerError | None:
        """Send, as a member, this node's share to the root until it says that the round is over.
        Repeat it, because the root may be gone or may have restarted. Return the error if it does
        not answer.
        """
        end = self._context.monotonic() + ROUND
        while not active.told.done():
            answer = await self._context.ask(
                active.plan.root, "result", self._share(active), HANDING_IN
            )
            if active.told.done():
                break
            if isinstance(answer, PeerError):
                return answer
            await asyncio.wait({active.told}, timeout=REPEAT)
            if self._context.monotonic() > end:
                return PeerError(Outcome.HUNG, SILENT)
        return None

    def _share(self, active: ActiveRound) -> dict[str, Any]:
        share = active.shares[self._context.node.name]
        return {"round": active.plan.round, **share.message()}

    def _others(self, active: ActiveRound) -> tuple[str, ...]:
        return active.plan.others(self._context.node.name)

    # What it comes to

    async def _conclude(self, active: ActiveRound) -> RoundResult:
        told = active.told.result()
        outcome, stage, reason = told["outcome"], told["stage"], told["reason"]
        if told["kind"] is Kind.LIGHT:
            active.plan = active.plan.light()
        if outcome is Outcome.DECLINED or (
            outcome is Outcome.INCONCLUSIVE and stage is Stage.INVITE
        ):
            # A decline or a failed call is between that member and the root.
            return RoundResult(outcome, stage, (), (), reason)
        if active.decided:
            return self._combined(active, {})
        if outcome is Outcome.INCONCLUSIVE and reason == STARVED:
            # The root's own share may be missing because it was starved; it is not hung.
            return RoundResult(outcome, stage, reason=reason)
        named = [name for name in told["late"] if name in self._others(active)]
        if outcome in _GONE or (told["kind"] is Kind.LIGHT and outcome is not Outcome.OK):
            return await self._check_gone(active, told, named)
        if told["kind"] is Kind.LIGHT:
            return RoundResult(outcome, stage, (), (), reason)
        return await self._from_shares(active)

    async def _check_gone(
        self, active: ActiveRound, told: Mapping[str, Any], named: Iterable[str]
    ) -> RoundResult:
        """Call, as a member, those that the root could not reach: a gone node is gone for all."""
        outcome, stage, reason = told["outcome"], told["stage"], told["reason"]
        me, root = self._context.node.name, active.plan.root
        if me in told["late"] or root in named:
            # The problem is between the root and this node, so this node is late.
            return RoundResult(outcome, stage, (), (me,), reason)
        errors = await self._context.absent(named, PRESENCE)
        gone = {name: error for name, error in errors.items() if error.outcome in _GONE}
        if not gone:
            return RoundResult(Outcome.INCONCLUSIVE, stage, (), (), DISPUTED)
        first = next(iter(gone.values()))
        return RoundResult(first.outcome, stage, (), tuple(sorted(gone)), first.reason)

    async def _from_shares(self, active: ActiveRound) -> RoundResult:
        """Combine the other members' shares, after querying those that have sent none."""
        me, root = self._context.node.name, active.plan.root
        missing = await active.missing(self._others(active), STRAGGLERS, or_decided=True)
        if active.decided or (not missing and me in active.shares):
            return self._combined(active, {})
        if me not in active.shares:
            # This node's workers are still running. Unless other members have finished, only the
            # root says that the round is over.
            alone = len(active.plan.members) > PAIR and not active.shares.keys() - {root}
            return (
                RoundResult(Outcome.INCONCLUSIVE, active.stage, (), (), DISPUTED)
                if alone
                else RoundResult(Outcome.HUNG, active.stage, (), (me,), SILENT)
            )
        asked = {"round": active.plan.round, "ranks": (), "timings": ()}
        errors = await self._context.errors(
            [name for name in missing if name != root], "result", asked, PRESENCE
        )
        if any(error.reason == Decline.ROUND for error in errors.values()):
            # This member was never invited, or has left: only the root knows why.
            return RoundResult(Outcome.INCONCLUSIVE, active.stage, (), (), DISPUTED)
        silent = {
            name: (error.outcome, error.reason)
            if error.outcome in {*_GONE, Outcome.INCONCLUSIVE}
            else (Outcome.HUNG, SILENT)
            for name, error in errors.items()
        }
        if root in missing:
            silent[root] = Outcome.HUNG, SILENT
        return self._combined(active, silent)

    def _combined(
        self, active: ActiveRound, silent: Mapping[str, tuple[Outcome, str]]
    ) -> RoundResult:
        return combine(active.plan, self._context.node.name, active.shares, silent)
