"""One agent's part in rounds: it leads one or takes part in one, never in two that use the GPUs.

The root invites all members; each answers that it is ready, which starts its workers, or declines with a reason. The workers meet in
the root's store; each member sends the root what its workers gave, and the root sends every member what it all comes to, so that all
have the same observation. Where a member may not use its GPUs now, the round becomes a light one. Whoever falls silent is late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dshealthd import __version__
from dshealthd.probe.members.schedule import root_order
from dshealthd.probe.observation import Kind, Observation, Outcome, Stage
from dshealthd.probe.peers.contract import PeerError, Refusal
from dshealthd.probe.rounds import light, remote_store
from dshealthd.probe.rounds.conclusion import SILENT, Findings, Scores, Share, combine, score_fields, scores_of, timing_fields, timings_of
from dshealthd.probe.rounds.plan import ON_DEMAND, Plan, job
from dshealthd.probe.rounds.remote_store import RemoteStore
from dshealthd.probe.workers.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.rounds.remote_store import Peers
    from dshealthd.probe.workers.job import RankResult, WorkerJob
    from dshealthd.probe.workers.store import StoreHandler

    Handler = Callable[[str, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]

log = logging.getLogger(__name__)

INVITATION = 2.0
"""Seconds for the answer to an invitation."""
SHARE = 4.0
"""Seconds after its own workers have ended that the root waits for what the others' gave."""
FIRST = 1.0
"""Seconds after which it asks those that have sent nothing whether they are there."""
PRESENCE = 1.0
"""Seconds for a member that is silent to answer an echo."""
CONCLUSION = 2.0
"""Seconds for a member to take the conclusion."""
ROUND = 60.0
"""Seconds after which a member takes the root for silent; each of its stages has a shorter deadline."""
LIGHT_ROUND = 20.0
"""The same in a light round."""
REPEAT = 3.0
"""Seconds after which a member that waits for the conclusion sends its share again."""
EPOCHS_APART = 1
"""Epochs by which the clocks of two members may differ."""
MAX_WAITING = 32
"""Light rounds of others that are waited for."""


class Decline:
    """Reasons to take no part, beside those of the policy, which make a round light."""

    CLOCK = "clock_differs"
    MEMBERS = "members_differ"
    VERSION = "version_differs"
    TESTING = "already_testing"
    GPUS = "gpus_differ"
    ROUND = "unknown_round"
    MALFORMED = "malformed"


DISAGREEMENTS = frozenset({Decline.CLOCK, Decline.MEMBERS, Decline.VERSION, "not_a_member"})
"""Reasons that say that two nodes are set up differently."""
_FULL = frozenset({*DISAGREEMENTS, Decline.TESTING, Decline.ROUND, Decline.MALFORMED, "rate_limited", "switched_off"})
"""Declined as a whole: what is declined for another reason may still be a light round."""


class Workers(Protocol):
    """The processes of this node that run collectives."""

    async def run(self, job: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]) -> list[RankResult]:
        """Run this node's ranks and return their results; when cancelled, end them."""


class Node(Protocol):
    """What a round has to know of the node that it runs on."""

    name: str
    address: str
    """For the workers, in numbers."""
    interface: str

    @property
    def adapters(self) -> Sequence[str]:
        """The adapter next to each GPU, or none."""

    def membership(self) -> Membership:
        """Return the members as they are believed to be now."""

    def epoch(self) -> int:
        """Return the number of the epoch by this node's clock."""

    def gpus(self) -> int:
        """Return how many GPUs the node has."""

    def objection(self, plan: Plan) -> str:
        """Return why no workers may run for this plan now, as a slug; empty if they may."""

    def scores(self) -> Scores:
        """Return what to tell peers of itself."""


@dataclass(frozen=True, slots=True)
class Report:
    """A round that is over."""

    observation: Observation
    plan: Plan
    """As it was meant: where it became a light one, that is told by the observation."""
    seconds: float
    led: bool
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Seconds by which the clocks of others are ahead of this node's, as far as a light round told."""


@dataclass(eq=False)
class _Part:
    """A round in progress."""

    plan: Plan
    started: float
    led: bool
    reason: str = ""
    """Why it is a light one."""
    store: LocalStore = field(default_factory=LocalStore)
    shares: dict[str, Share] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """What the root says that the round comes to."""
    ended: asyncio.Future[Report] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    scores: dict[str, Scores] = field(default_factory=dict)
    stage: Stage = Stage.INVITE
    inviting: asyncio.Task[dict[str, dict[str, Any] | PeerError]] | None = None
    successor: _Part | None = None
    """The same group's round under another root, which came first in its order."""

    @property
    def decided(self) -> bool:
        """Whether a share tells already what is wrong, and with whom."""
        return any(share.own_finding for share in self.shares.values())


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
        self._peers = peers
        self._workers = workers
        self._done = done
        self._monotonic = monotonic
        self._wall = wall
        self._progress = progress
        self._current: _Part | None = None
        self._parts: dict[str, _Part] = {}
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
            findings, offsets = await self._lead(part)
        except _Superseded as superseded:
            return await asyncio.shield(superseded.successor.ended)
        finally:
            self._leave(part)
        return self._end(part, findings, offsets)

    async def _lead(self, part: _Part) -> tuple[Findings, Mapping[str, float]]:
        plan = part.plan
        others = plan.others(self._node.name)
        invitation = {**plan.invitation(), "scores": score_fields(part.scores[self._node.name])}
        offsets: dict[str, float] = {}
        part.inviting = asyncio.create_task(self._invite_all(others, invitation, offsets))
        try:
            answers = await part.inviting
        except asyncio.CancelledError:
            if part.successor is not None:
                raise _Superseded(part.successor) from None
            part.inviting.cancel()
            raise
        part.inviting = None
        errors = {name: answer for name, answer in answers.items() if isinstance(answer, PeerError)}
        for name, answer in answers.items():
            if not isinstance(answer, PeerError):
                part.scores[name] = scores_of(answer, name)
        gone = {name: error for name, error in errors.items() if error.outcome is not Outcome.DECLINED}
        if gone:
            first = next(iter(gone.values()))
            findings = Findings(first.outcome, Stage.INVITE, (), tuple(sorted(gone)), first.reason)
        elif plan.kind is Kind.LIGHT or errors:
            findings, measured = await self._light(part, errors)
            offsets.update(measured)
        else:
            findings = await self._full(part)
        await self._tell(part, findings, offsets, [name for name in others if name not in gone])
        return findings, offsets

    async def _light(self, part: _Part, errors: Mapping[str, PeerError]) -> tuple[Findings, Mapping[str, float]]:
        """Measure every member that is there by echoes."""
        declined = [error.reason for error in errors.values()]
        whole = next((reason for reason in declined if reason in _FULL), "")
        if part.plan.kind is not Kind.LIGHT:
            part.plan = part.plan.light()
            part.reason = whole or declined[0]
        if whole == Decline.TESTING:
            return Findings(Outcome.DECLINED, Stage.INVITE, (), tuple(sorted(errors)), whole), {}
        part.stage = Stage.SIZES
        others = part.plan.others(self._node.name)
        found = await asyncio.gather(*(self._measure(name) for name in others))
        bad = {name: answer for name, answer in zip(others, found, strict=True) if isinstance(answer, PeerError)}
        echoes = {name: answer for name, answer in zip(others, found, strict=True) if isinstance(answer, light.Echoes)}
        offsets = {name: echo.offset for name, echo in echoes.items()}
        worst = max(echoes.values(), key=lambda echo: echo.round_trip, default=None)
        timings = () if worst is None else worst.timings
        if bad:
            first = next(iter(bad.values()))
            return Findings(first.outcome, Stage.SIZES, (), tuple(sorted(bad)), first.reason), offsets
        if whole:
            return Findings(Outcome.DECLINED, Stage.INVITE, timings, tuple(sorted(errors)), whole), offsets
        return Findings(Outcome.OK, Stage.DONE, timings, (), part.reason), offsets

    async def _measure(self, name: str) -> light.Echoes | PeerError:
        try:
            return await light.measure(self._peers, name, self._monotonic, self._wall)
        except PeerError as error:
            return error

    async def _full(self, part: _Part) -> Findings:
        """Run this node's workers and take the others' shares."""
        me = self._node.name
        await self._work_until_decided(part)
        others = part.plan.others(me)
        missing = await self._wait_for_shares(part, others, FIRST)
        silent: dict[str, tuple[Outcome, str]] = {}
        if missing:
            # Whose agent does not answer any more is not waited for.
            here = await asyncio.gather(*(self._present(name) for name in missing))
            silent = {name: (error.outcome, error.reason) for name, error in zip(missing, here, strict=True) if error is not None}
            waited = [name for name in missing if name not in silent]
            # Where one has found itself at fault, who says nothing yet is waiting for that one, and learns it from the conclusion.
            for name in [] if part.decided else await self._wait_for_shares(part, waited, SHARE):
                silent[name] = Outcome.HUNG, SILENT
        for name, share in part.shares.items():
            part.scores[name] = share.scores or part.scores.get(name, ())
        part.scores[me] = self._node.scores()
        return combine(part.plan, part.shares, silent)

    async def _work_until_decided(self, part: _Part) -> None:
        """Run this node's workers, but not on and on for a member that has found itself at fault and will not come."""
        working = asyncio.create_task(self._work(part, part.store), name=f"workers of round {part.plan.round}")
        try:
            while not working.done() and not part.decided:
                part.arrived.clear()
                arrival = asyncio.create_task(part.arrived.wait())
                await asyncio.wait({working, arrival}, return_when=asyncio.FIRST_COMPLETED)
                arrival.cancel()
            await asyncio.wait({working}, timeout=FIRST)
            if working.done():
                part.shares[self._node.name] = Share(working.result())
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _present(self, name: str) -> PeerError | None:
        try:
            await self._peers.call(name, "echo", {"clock": self._wall(), "payload": b""}, PRESENCE)
        except PeerError as error:
            return error
        return None

    @staticmethod
    async def _wait_for_shares(part: _Part, names: Sequence[str], seconds: float) -> list[str]:
        """Return whose share has not come."""
        missing = [name for name in names if name not in part.shares]
        if missing:
            try:
                async with asyncio.timeout(seconds):
                    while missing:
                        part.arrived.clear()
                        await part.arrived.wait()
                        missing = [name for name in names if name not in part.shares]
            except TimeoutError:
                pass
        return missing

    async def _tell(self, part: _Part, findings: Findings, offsets: Mapping[str, float], names: Sequence[str]) -> None:
        """Send the conclusion to the members that are there."""
        body = {
            "round": part.plan.round,
            "kind": part.plan.kind,
            "outcome": findings.outcome,
            "stage": findings.stage,
            "timings": timing_fields(findings.timings),
            "late": findings.late,
            "reason": findings.reason,
            "scores": score_fields(score for scores in part.scores.values() for score in scores),
        }
        calls = [
            self._ask(name, "conclusion", {**body, "offset": offsets[name]} if name in offsets else body, CONCLUSION) for name in names
        ]
        for name, answer in zip(names, await asyncio.gather(*calls), strict=True):
            if isinstance(answer, PeerError) and answer.reason != Decline.ROUND:
                log.debug("round %s: %s did not take its conclusion: %s", part.plan.round, name, answer)

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
            self._spawn(self._await_light(part), plan)
            if objection:
                raise Refusal(objection)
        else:
            self._current = part
            self._spawn(self._take_part(part), plan)
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

    def _gives_way(self, current: _Part, plan: Plan) -> bool:
        """Tell whether the round in hand ends for another one: both members of a group have started, and the other comes first."""
        if not current.led or current.inviting is None or set(current.plan.members) != set(plan.members):
            return False
        order = root_order(plan.members, plan.epoch)
        return order.index(plan.root) < order.index(self._node.name)

    async def _take_part(self, part: _Part) -> None:
        """Run this node's workers for another's round, and tell it what they gave."""
        me, plan = self._node.name, part.plan
        store = RemoteStore(self._peers, plan.root, plan.round, self._monotonic)
        working = asyncio.create_task(self._work(part, store), name=f"workers of round {plan.round}")
        try:
            both: set[asyncio.Future[Any]] = {working, part.told}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if part.told.done():  # it is over before it has begun: another member declined
                findings = self._told(part)
            else:
                part.shares[me] = Share(working.result(), self._node.scores())
                findings = await self._hand_in(part)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            self._leave(part)
        self._end(part, findings, self._offsets(part))

    async def _hand_in(self, part: _Part) -> Findings:
        """Send this node's share and wait for the conclusion."""
        me, root = self._node.name, part.plan.root
        share = {"round": part.plan.round, **part.shares[me].message()}
        answer: dict[str, Any] | PeerError = {}
        end = self._monotonic() + ROUND
        while not part.told.done() and not isinstance(answer, PeerError):
            # Again and again, as the root may be gone by now, or may have been started anew.
            answer = await self._ask(root, "result", share, CONCLUSION)
            if not isinstance(answer, PeerError):
                await asyncio.wait({part.told}, timeout=REPEAT)
                if self._monotonic() > end:
                    answer = PeerError(Outcome.HUNG, SILENT)
        if part.told.done():
            return self._told(part)
        assert isinstance(answer, PeerError)  # noqa: S101 - else it was told
        outcome = Outcome.HUNG if answer.outcome is Outcome.DECLINED else answer.outcome
        return combine(part.plan, part.shares, {root: (outcome, answer.reason)})

    async def _await_light(self, part: _Part) -> None:
        """Wait for the conclusion of a light round, whose echoes are answered as all echoes are."""
        part.plan = part.plan.light()
        try:
            async with asyncio.timeout(LIGHT_ROUND):
                await asyncio.shield(part.told)
            findings = self._told(part)
        except TimeoutError:
            findings = Findings(Outcome.HUNG, Stage.SIZES, (), (part.plan.root,), SILENT)
        finally:
            self._leave(part)
        self._end(part, findings, self._offsets(part))

    def _told(self, part: _Part) -> Findings:
        """Return what the root says that the round comes to."""
        body = part.told.result()
        if body["kind"] is Kind.LIGHT:
            part.plan = part.plan.light()
        part.scores = {"": scores_of(body, *part.plan.members)}
        late = tuple(name for name in body["late"] if name in part.plan.members)
        return Findings(body["outcome"], body["stage"], timings_of(body["timings"]), late, body["reason"])

    @staticmethod
    def _offsets(part: _Part) -> Mapping[str, float]:
        if not part.told.done() or "offset" not in part.told.result():
            return {}
        return {part.plan.root: -part.told.result()["offset"]}

    # What both do

    async def _work(self, part: _Part, store: StoreHandler) -> tuple[RankResult, ...]:
        node = self._node
        assert self._workers is not None  # noqa: S101 - who has none is not ready

        def progress(rank: int, stage: Stage) -> None:
            part.stage = stage
            self._progress(rank, stage)

        work = job(part.plan, node.name, address=node.address, interface=node.interface, adapters=node.adapters)
        return tuple(await self._workers.run(work, store, progress))

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

    def _led(self, sender: str, body: Mapping[str, Any]) -> _Part:
        """Return the round of a message that a member sends to its root."""
        part = self._parts.get(body["round"])
        if part is None or not part.led or sender not in part.plan.others(self._node.name):
            raise Refusal(Decline.ROUND)
        return part

    def _begin(self, plan: Plan, *, led: bool, reason: str) -> _Part:
        part = self._parts[plan.round] = _Part(plan, self._monotonic(), led, reason)
        part.scores[self._node.name] = self._node.scores()
        return part

    def _leave(self, part: _Part) -> None:
        self._parts.pop(part.plan.round, None)
        if self._current is part:
            self._current = None

    def _end(self, part: _Part, findings: Findings, offsets: Mapping[str, float]) -> Report:
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

    async def _ask(self, name: str, method: str, body: Mapping[str, Any], deadline: float) -> dict[str, Any] | PeerError:
        try:
            return await self._peers.call(name, method, body, deadline)
        except PeerError as error:
            return error

    async def _invite_all(
        self, names: Sequence[str], invitation: Mapping[str, Any], offsets: dict[str, float]
    ) -> dict[str, dict[str, Any] | PeerError]:
        """Return the answers to an invitation; `offsets` takes how far the clocks of those that are ready are ahead."""

        async def invite(name: str) -> dict[str, Any] | PeerError:
            sent_at, sent = self._wall(), self._monotonic()
            answer = await self._ask(name, "invite", invitation, INVITATION)
            if not isinstance(answer, PeerError) and "clock" in answer:
                offsets[name] = answer["clock"] - (sent_at + (self._monotonic() - sent) / 2)
            return answer

        answers = await asyncio.gather(*map(invite, names))
        return dict(zip(names, answers, strict=True))


class _Superseded(Exception):
    """Another member leads the same group's round."""

    def __init__(self, successor: _Part) -> None:
        super().__init__()
        self.successor = successor
