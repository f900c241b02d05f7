"""One agent's part in rounds: it leads one or takes part in one, never in two that use the GPUs.

The root invites all members; each answers that it is ready, which starts its workers, or declines with a reason. The workers meet in
the root's store; each member sends the root what its workers gave, and the root sends every member what it all comes to, so that all
have the same observation. Where a member may not use its GPUs now, the round becomes a light one. Whoever falls silent is late.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dshealthd import __version__
from dshealthd.probe.members.schedule import root_order
from dshealthd.probe.observation import Kind
from dshealthd.probe.peers.contract import Refusal
from dshealthd.probe.rounds import remote_store
from dshealthd.probe.rounds.conclusion import Share, score_fields, scores_of
from dshealthd.probe.rounds.leader import Leader, Superseded
from dshealthd.probe.rounds.member import Member
from dshealthd.probe.rounds.part import Decline, Means, Part, Report
from dshealthd.probe.rounds.plan import ON_DEMAND, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from dshealthd.probe.observation import Stage
    from dshealthd.probe.rounds.conclusion import Findings
    from dshealthd.probe.rounds.part import Node, Workers
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
        node: Node,
        peers: Peers,
        workers: Workers | None,
        done: Callable[[Report], None],
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        progress: Callable[[int, Stage], None] = lambda _rank, _stage: None,
    ) -> None:
        """Each round that this node leads or takes part in ends with one call of `done`. Without `workers` all rounds are light."""
        self._node = node
        self._workers = workers
        self._done = done
        self._monotonic = monotonic
        self._wall = wall
        means = Means(node, peers, workers, monotonic, wall, progress)
        self._leader = Leader(means)
        self._member = Member(means)
        self._current: Part | None = None
        self._parts: dict[str, Part] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether a round is in progress that keeps this node from another one."""
        return self._current is not None

    def joined(self, epoch: int, members: Iterable[str]) -> bool:
        """Tell whether a round of this epoch with these members is in progress."""
        return any(part.plan.epoch == epoch and set(part.plan.members) == set(members) for part in self._parts.values())

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers other nodes' calls, by method."""
        return {
            "invite": self._invited,
            "store": self._store,
            "result": self._result,
            "conclusion": self._concluded,
            "echo": self._echo,
        }

    async def close(self) -> None:
        """Give up the rounds in progress."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Leading

    async def lead(self, plan: Plan, reason: str = "") -> Report | None:
        """Lead a round and return what came of it; None where this node is in another one.

        `reason` says why a plan for a light round is one. Where another member leads the same group's round, that one's report is returned.
        """
        if self._current is not None:
            return None
        part = self._begin(plan, led=True, reason=reason)
        self._current = part
        try:
            findings, offsets = await self._leader.lead(part)
        except Superseded as superseded:
            return await asyncio.shield(superseded.successor.ended)
        finally:
            self._leave(part)
        return self._end(part, findings, offsets)

    # Taking part

    async def _invited(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        plan = Plan.invited(body)
        self._check(sender, plan)
        current = self._current
        objection = "" if plan.kind is Kind.LIGHT else self._node.objection(plan)
        if not objection and plan.kind is not Kind.LIGHT:
            objection = "no_python" if self._workers is None else Decline.GPUS if plan.ranks > max(1, self._node.gpus()) else ""
        if current is not None and not self._gives_way(current, plan):
            raise Refusal(Decline.TESTING)
        if len(self._parts) >= MAX_WAITING:
            raise Refusal(Decline.TESTING)
        part = self._begin(plan, led=False, reason=objection)
        part.scores[sender] = scores_of(body, sender)
        if current is not None and current.inviting is not None:
            current.successor = part
            current.inviting.cancel()
            self._current = None
        if plan.kind is Kind.LIGHT or objection:
            self._spawn(self._follow(part, self._member.await_light), plan)
            if objection:
                raise Refusal(objection)
        else:
            self._current = part
            self._spawn(self._follow(part, self._member.take_part), plan)
        return {"scores": score_fields(part.scores[self._node.name]), "clock": self._wall()}

    def _check(self, sender: str, plan: Plan) -> None:
        """Refuse an invitation that does not fit what this node knows."""
        me = self._node.name
        membership = self._node.membership()
        if sender != plan.root or me not in plan.members or len(set(plan.members)) != len(plan.members) or plan.round in self._parts:
            raise Refusal(Decline.MALFORMED)
        if plan.version != __version__:
            raise Refusal(Decline.VERSION)
        if plan.epoch != ON_DEMAND and abs(plan.epoch - self._node.epoch()) > EPOCHS_APART:
            raise Refusal(Decline.CLOCK)
        if plan.digest != membership.digest or not set(plan.members) <= set(membership.names):
            raise Refusal(Decline.MEMBERS)

    def _gives_way(self, current: Part, plan: Plan) -> bool:
        """Tell whether the round in hand ends for another one: both members of a group have started, and the other comes first."""
        if not current.led or current.inviting is None or set(current.plan.members) != set(plan.members):
            return False
        order = root_order(plan.members, plan.epoch)
        return order.index(plan.root) < order.index(self._node.name)

    async def _follow(self, part: Part, take: Callable[[Part], Coroutine[Any, Any, Findings]]) -> None:
        """Take part in a round until it is over."""
        try:
            findings = await take(part)
        finally:
            self._leave(part)
        self._end(part, findings, part.offsets)

    # What members send

    async def _store(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        return await remote_store.serve(self._led(sender, body).store, body)

    async def _result(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        part = self._led(sender, body)
        place = part.plan.members.index(sender)
        ranks = range(place * part.plan.ranks, (place + 1) * part.plan.ranks)
        if sorted(entry["rank"] for entry in body["ranks"]) != list(ranks):
            raise Refusal(Decline.MALFORMED)
        part.shares.setdefault(sender, Share.told(body, sender))
        part.arrived.set()
        return {}

    async def _concluded(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        part = self._parts.get(body["round"])
        if part is None or part.led or sender != part.plan.root or part.told.done():
            raise Refusal(Decline.ROUND)
        part.told.set_result(body)
        return {}

    async def _echo(self, _sender: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"clock": self._wall(), "payload": body["payload"], "digest": self._node.membership().digest}

    def _led(self, sender: str, body: Mapping[str, Any]) -> Part:
        """Return the round of a message that a member sends to its root."""
        part = self._parts.get(body["round"])
        if part is None or not part.led or sender not in part.plan.others(self._node.name):
            raise Refusal(Decline.ROUND)
        return part

    # Rounds in progress

    def _begin(self, plan: Plan, *, led: bool, reason: str) -> Part:
        part = self._parts[plan.round] = Part(plan, self._monotonic(), led, reason)
        part.scores[self._node.name] = self._node.scores()
        return part

    def _leave(self, part: Part) -> None:
        self._parts.pop(part.plan.round, None)
        if self._current is part:
            self._current = None

    def _end(self, part: Part, findings: Findings, offsets: Mapping[str, float]) -> Report:
        scores = tuple(score for scores in part.scores.values() for score in scores)
        observation = findings.observation(part.plan, scores, self._wall())
        report = Report(observation, part.plan, self._monotonic() - part.started, part.led, offsets)
        part.ended.set_result(report)
        self._done(report)
        return report

    def _spawn(self, work: Coroutine[Any, Any, None], plan: Plan) -> None:
        task = asyncio.create_task(work, name=f"round {plan.round}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
