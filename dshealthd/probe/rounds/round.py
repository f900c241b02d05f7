"""The rounds of one agent: it leads one or takes part in one, never in two that use the GPUs.

The root invites all members; each answers that it is ready, which starts its workers, or declines
with a reason. The workers meet in the root's store; each member gives all others what its workers
gave, the root when it tells that the round is over. From these each member puts together what the
round comes to: nobody speaks for anybody else, so one that lies can blame nobody but itself.
Where a member may not use its GPUs now, the round becomes a light one. Whoever falls silent is
late.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dshealthd.probe.members.schedule import root_order
from dshealthd.probe.observation import Kind
from dshealthd.probe.peers.contract import Refusal
from dshealthd.probe.rounds import remote_store
from dshealthd.probe.rounds.active_round import ActiveRound, Decline, RoundContext, RoundReport
from dshealthd.probe.rounds.conclusion import MemberResult, score_fields, scores_of
from dshealthd.probe.rounds.leader import Leader, Superseded
from dshealthd.probe.rounds.member import Participant
from dshealthd.probe.rounds.plan import ON_DEMAND, SPEAKS, RoundPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from dshealthd.probe.observation import Stage
    from dshealthd.probe.rounds.active_round import LocalNode, Workers
    from dshealthd.probe.rounds.conclusion import RoundResult
    from dshealthd.probe.rounds.remote_store import Peers

    Handler = Callable[[str, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]

EPOCHS_APART = 1
"""Epochs by which the clocks of two members may differ."""
MAX_WAITING = 32
"""Light rounds of others that are waited for."""


class Rounds:
    """The rounds of one node."""

    def __init__(
        self,
        node: LocalNode,
        peers: Peers,
        workers: Workers | None,
        done: Callable[[RoundReport], None],
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        waited: Callable[[], float | None],
        progress: Callable[[int, Stage], None] = lambda _rank, _stage: None,
    ) -> None:
        """Each round that this node leads or takes part in ends with one call of `done`.

        Without `workers` all rounds are light. `waited` gives the seconds for which this agent has
        waited for a CPU.
        """
        self._node = node
        self._workers = workers
        self._done = done
        self._monotonic = monotonic
        self._wall = wall
        self._waited = waited
        context = RoundContext(node, peers, workers, monotonic, wall, waited, progress)
        self._leader = Leader(context)
        self._member = Participant(context)
        self._current: ActiveRound | None = None
        self._parts: dict[str, ActiveRound] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether one of the rounds in progress keeps this node from another one."""
        return self._current is not None

    def joined(self, epoch: int, members: Iterable[str]) -> bool:
        """Tell whether the agent is in a round of this epoch with these members."""
        return any(
            active.plan.epoch == epoch and set(active.plan.members) == set(members)
            for active in self._parts.values()
        )

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers the calls that belong to the agent's rounds, by method."""
        return {
            "invite": self._invited,
            "store": self._store,
            "result": self._result,
            "conclusion": self._concluded,
            "echo": self._echo,
        }

    async def close(self) -> None:
        """Give up the agent's rounds in progress."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Leading

    async def lead(self, plan: RoundPlan, reason: str = "") -> RoundReport | None:
        """Lead a round and return what came of it; None where the agent is in another one.

        `reason` says why a plan for a light round is one. Where another member leads the same
        group's round, that one's report is returned.
        """
        if self._current is not None:
            return None
        active = self._begin(plan, led=True, reason=reason)
        self._current = active
        try:
            findings, offsets = await self._leader.lead(active)
        except Superseded as superseded:
            # The successor's task has others waiting for it: whoever cancels this call must not
            # cancel its end.
            return await asyncio.shield(superseded.successor.ended)
        finally:
            self._leave(active)
        return self._end(active, findings, offsets)

    # Taking part

    async def _invited(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        plan = RoundPlan.invited(body)
        self._check(sender, plan)
        current = self._current
        objection = "" if plan.kind is Kind.LIGHT else self._node.objection(plan)
        if not objection and plan.kind is not Kind.LIGHT:
            objection = (
                "no_python"
                if self._workers is None
                else Decline.GPUS
                if plan.ranks > max(1, self._node.gpus())
                else ""
            )
        if current is not None and not self._gives_way(current, plan):
            raise Refusal(Decline.TESTING)
        # Bounds what peers can make this node keep: a light round costs them one message.
        if len(self._parts) >= MAX_WAITING:
            raise Refusal(Decline.TESTING)
        active = self._begin(plan, led=False, reason=objection)
        active.scores[sender] = scores_of(body, sender)
        if current is not None and current.inviting is not None:
            current.successor = active
            # Only the invitations: `Leader` learns from `successor` that it was this and not its
            # own end.
            current.inviting.cancel()
            self._current = None
        if plan.kind is Kind.LIGHT or objection:
            self._spawn(self._follow(active, self._member.await_light), plan)
            if objection:
                # Refused, but followed: the root turns a round that one declines into a light one,
                # and says how that ended.
                raise Refusal(objection)
        else:
            self._current = active
            self._spawn(self._follow(active, self._member.take_part), plan)
        return {"scores": score_fields(active.scores[self._node.name]), "clock": self._wall()}

    def _check(self, sender: str, plan: RoundPlan) -> None:
        """Refuse an invitation to a round that does not fit what this node knows."""
        me = self._node.name
        membership = self._node.membership()
        if (
            sender != plan.root
            or me not in plan.members
            or len(set(plan.members)) != len(plan.members)
            or plan.round in self._parts
        ):
            raise Refusal(Decline.MALFORMED)
        if plan.version != SPEAKS:
            raise Refusal(Decline.VERSION)
        if plan.epoch != ON_DEMAND and abs(plan.epoch - self._node.epoch()) > EPOCHS_APART:
            raise Refusal(Decline.CLOCK)
        if plan.digest != membership.digest or not set(plan.members) <= set(membership.names):
            raise Refusal(Decline.MEMBERS)

    def _gives_way(self, current: ActiveRound, plan: RoundPlan) -> bool:
        """Tell whether the round in hand ends for another one.

        Both members of a group have started, and the other comes first, or its round is of a later
        epoch; an extra one is of none. Of two rounds that cross exactly one must give way, so both
        ends have to compare the same.
        """
        if (
            not current.led
            or current.inviting is None
            or set(current.plan.members) != set(plan.members)
        ):
            return False
        if plan.epoch != current.plan.epoch:
            return plan.epoch > current.plan.epoch
        order = root_order(plan.members, plan.epoch)
        return order.index(plan.root) < order.index(self._node.name)

    async def _follow(
        self, active: ActiveRound, take: Callable[[ActiveRound], Coroutine[Any, Any, RoundResult]]
    ) -> None:
        """Take part in another agent's round until it is over."""
        try:
            findings = await take(active)
        finally:
            self._leave(active)
        self._end(active, findings, active.offsets)

    # What members send

    async def _store(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        return await remote_store.serve(self._led(sender, body).store, body)

    async def _result(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        active = self._parts.get(body["round"])
        if active is None or sender not in active.plan.others(self._node.name):
            raise Refusal(Decline.ROUND)
        if not active.plan.has_ranks(sender, (entry["rank"] for entry in body["ranks"])):
            raise Refusal(Decline.MALFORMED)
        share = MemberResult.told(body, sender)
        # Senders repeat a share whose answer was lost. The first one counts: others have been given
        # that too, and all are to come to the same conclusion.
        active.shares.setdefault(sender, share)
        active.scores[sender] = share.scores or active.scores.get(sender, ())
        active.arrived.set()
        return {}

    async def _concluded(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        active = self._parts.get(body["round"])
        if active is None or active.led or sender != active.plan.root or active.told.done():
            raise Refusal(Decline.ROUND)
        if active.plan.has_ranks(sender, (entry["rank"] for entry in body["ranks"])):
            active.shares.setdefault(sender, MemberResult.told(body, sender))
        elif body["ranks"]:
            raise Refusal(Decline.MALFORMED)
        active.scores[sender] = scores_of(body, sender)
        active.told.set_result(body)
        return {}

    async def _echo(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = {
            "clock": self._wall(),
            "payload": body["payload"],
            "digest": self._node.membership().digest,
        }
        # Other releases may ask too, to set their clocks beside this one's, and would refuse a
        # field that they do not know. Who leads a round here is of this release.
        if any(active.plan.root == sender for active in self._parts.values()):
            waited = self._waited()
            answer |= {} if waited is None else {"waited": waited}
        return answer

    def _led(self, sender: str, body: Mapping[str, Any]) -> ActiveRound:
        """Return the round of a message that a member sends to its root."""
        active = self._parts.get(body["round"])
        if active is None or not active.led or sender not in active.plan.others(self._node.name):
            raise Refusal(Decline.ROUND)
        return active

    # Rounds in progress

    def _begin(self, plan: RoundPlan, *, led: bool, reason: str) -> ActiveRound:
        active = self._parts[plan.round] = ActiveRound(plan, self._monotonic(), led, reason)
        active.scores[self._node.name] = self._node.scores()
        return active

    def _leave(self, active: ActiveRound) -> None:
        active.lag.close()
        self._parts.pop(active.plan.round, None)
        if self._current is active:
            self._current = None

    def _end(
        self, active: ActiveRound, findings: RoundResult, offsets: Mapping[str, float]
    ) -> RoundReport:
        scores = tuple(score for scores in active.scores.values() for score in scores)
        findings = findings.unless_starved(starved=active.lag.starved)
        observation = findings.observation(active.plan, scores, self._wall())
        report = RoundReport(
            observation, active.plan, self._monotonic() - active.started, active.led, offsets
        )
        active.ended.set_result(report)
        self._done(report)
        return report

    def _spawn(self, work: Coroutine[Any, Any, None], plan: RoundPlan) -> None:
        task = asyncio.create_task(work, name=f"round {plan.round}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
