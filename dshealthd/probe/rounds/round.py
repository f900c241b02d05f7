"""The rounds of one agent: it leads or takes part in one at a time of those that use the GPUs.

The root invites the member, which answers that it is ready, which starts its workers, or declines
with a reason. The workers meet in the root's store. The member sends its workers' results to the
root, which draws the conclusion and announces it with the end of the round. If one may not use its
GPUs now, the root leads a light round instead. One that falls silent is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dshealthd.probe.members.schedule import root_order
from dshealthd.probe.observation import ON_DEMAND, Outcome, RoundKind, RoundPlan, RoundResult, Stage
from dshealthd.probe.peers.protocol import Refusal, Rejection
from dshealthd.probe.rounds import leader, member
from dshealthd.probe.rounds.active_round import WHOLE, ActiveRound, Decline, RoundReport
from dshealthd.probe.rounds.conclusion import unless_starved
from dshealthd.probe.workers import store

if TYPE_CHECKING:
    from dshealthd.probe.node import ThisNode

Handler = Callable[[str, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
EPOCHS_APART = 1
"""Epochs by which the clocks of two members may be apart."""
MAX_WAITING = 32
"""Most rounds in progress at a time; all but one are light rounds of others."""


class Rounds:
    """The rounds of one node."""

    def __init__(self, node: ThisNode, done: Callable[[RoundReport], None]) -> None:
        """Call `done` once at the end of each round that this node leads or takes part in."""
        self._node, self._done = node, done
        self._current: ActiveRound | None = None
        self._parts: dict[str, ActiveRound] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether a round in progress keeps this node from starting another."""
        return self._current is not None

    def takes_part_in(self, epoch: int, members: Iterable[str]) -> bool:
        """Return whether the agent is in a round of this epoch with these members."""
        return any(
            active.plan.epoch == epoch and set(active.plan.members) == set(members)
            for active in self._parts.values()
        )

    def handlers(self) -> Mapping[str, Handler]:
        """Return the handlers of calls that belong to the agent's rounds, by method."""
        return {
            "invite": self.invited,
            "store": self._store,
            "result": self._result,
            "conclusion": self._concluded,
            "echo": self._echo,
        }

    async def close(self) -> None:
        """Cancel the agent's rounds in progress."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Leading

    async def lead(self, plan: RoundPlan, reason: str = "") -> RoundReport | None:
        """Lead a round and return its report; None if the agent is already in another round, beside
        which this one cannot run, or takes part in one that the other member has begun at the same
        time. `reason` says why a plan for a light round is one.
        """
        beside = self._current is not None and self._runs_beside(self._current, plan)
        if self._current is not None and not beside:
            return None
        active = self._begin(plan, led=True, reason=reason)
        if not beside:
            self._current = active
        try:
            result = await leader.lead(self._node, active)
        finally:
            self._leave(active)
        if active.has_given_way:
            return None
        if (
            result.outcome is Outcome.DECLINED
            and result.reason not in WHOLE
            and result.stage is Stage.INVITE
            and plan.kind is not RoundKind.LIGHT  # whatever a later release declines it for
        ):
            return await self.lead(plan.light(), result.reason)
        return self._end(active, result)

    # Taking part

    async def invited(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        """Take part in the round that another node leads, or decline."""
        plan: RoundPlan = body["plan"]
        # First of all, as other invitations may come meanwhile.
        objection = "" if plan.kind is RoundKind.LIGHT else await self._node.objection(plan)
        self._check(sender, plan)
        current = self._current
        if current is not None and self._runs_beside(current, plan):
            current = None
        elif current is not None and not self._gives_way(current, plan):
            raise Refusal(Decline.TESTING)
        # Limits the state that peers can pile up here: a light round costs them one message.
        if len(self._parts) >= MAX_WAITING:
            raise Refusal(Decline.TESTING)
        if objection:
            raise Refusal(objection)
        active = self._begin(plan, led=False, reason="")
        active.report = body["report"]
        if current is not None:
            current.has_given_way, self._current = True, None
        if plan.kind is RoundKind.LIGHT:
            self._spawn(self._follow(active, member.await_light), plan)
        else:
            self._current = active
            self._spawn(self._follow(active, member.take_part), plan)
        return {"report": self._node.report(), "clock": self._node.wall()}

    def _check(self, sender: str, plan: RoundPlan) -> None:
        me = self._node.name
        membership = self._node.membership()
        if (
            plan.members != (sender, me)
            or plan.kind is RoundKind.LOCAL
            or plan.round in self._parts
        ):
            raise Refusal(Rejection.MALFORMED)
        if plan.epoch != ON_DEMAND and abs(plan.epoch - self._node.epoch()) > EPOCHS_APART:
            raise Refusal(Decline.CLOCK)
        if plan.digest != membership.digest:
            raise Refusal(Decline.MEMBERS)

    def _runs_beside(self, current: ActiveRound, plan: RoundPlan) -> bool:
        """Return whether a round can run beside the current one. Echoes can beside collectives,
        which take a minute with a node that loses packets; meanwhile the others would not meet
        either end.
        """
        is_working = not current.inviting and current.plan.kind is not RoundKind.LIGHT
        return plan.kind is RoundKind.LIGHT and is_working

    def _gives_way(self, current: ActiveRound, plan: RoundPlan) -> bool:
        """Return whether the current round gives way to another.

        It does if both members have started it and the other comes first in the order, or its round
        has a later epoch; an extra round has none. Exactly one of two crossing rounds must give
        way, so both ends make the same comparison.
        """
        if not current.inviting or current.peer != plan.root:
            return False
        if plan.epoch != current.plan.epoch:
            return plan.epoch > current.plan.epoch
        return root_order(plan.members, plan.epoch)[0] == plan.root

    async def _follow(
        self,
        active: ActiveRound,
        follow: Callable[[ThisNode, ActiveRound], Coroutine[Any, Any, RoundResult]],
    ) -> None:
        try:
            result = await follow(self._node, active)
        finally:
            self._leave(active)
        self._end(active, result)

    # What members send

    async def _store(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        return await store.serve(self._led(sender, body).store, body)

    async def _result(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        active = self._led(sender, body)
        if not active.plan.has_ranks(sender, (result.rank for result in body["ranks"])):
            raise Refusal(Rejection.MALFORMED)
        # A member repeats its share if the answer was lost. The first one counts: both must reach
        # the same conclusion.
        first, *others = body["ranks"]
        share = replace(first, timings=body["timings"]), *others
        active.shares.setdefault(sender, share)
        active.arrived.set()
        return {}

    async def _concluded(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        active = self._parts.get(body["round"])
        if active is None or active.led or sender != active.plan.root or active.told.done():
            raise Refusal(Decline.ROUND)
        active.told.set_result(body)
        return {}

    async def _echo(self, _sender: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = {"clock": self._node.wall(), "payload": body["payload"]}
        waited = self._node.waited()
        return answer if waited is None else answer | {"waited": waited}

    def _led(self, sender: str, body: Mapping[str, Any]) -> ActiveRound:
        """Return the round that this node leads and a member's message belongs to."""
        active = self._parts.get(body["round"])
        if active is None or not active.led or sender != active.peer:
            raise Refusal(Decline.ROUND)
        return active

    # Rounds in progress

    def _begin(self, plan: RoundPlan, *, led: bool, reason: str) -> ActiveRound:
        active = self._parts[plan.round] = ActiveRound(plan, self._node.monotonic(), led, reason)
        return active

    def _leave(self, active: ActiveRound) -> None:
        active.lag.close()
        self._parts.pop(active.plan.round, None)
        if self._current is active:
            self._current = None

    def _end(self, active: ActiveRound, result: RoundResult) -> RoundReport:
        result = unless_starved(result, starved=active.lag.starved)
        observation = result.observation(active.plan, active.report, self._node.wall())
        report = RoundReport(
            observation,
            active.plan,
            self._node.monotonic() - active.started,
            active.led,
            active.offset,
        )
        self._done(report)
        return report

    def _spawn(self, work: Coroutine[Any, Any, None], plan: RoundPlan) -> None:
        task = asyncio.create_task(work, name=f"round {plan.round}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
