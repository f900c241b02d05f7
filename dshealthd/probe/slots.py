"""The slots of one node: its rounds, epoch by epoch, scheduled and extra.

Each node has one round per epoch, with the member that the schedule assigns. The round uses the
GPUs if the policy allows it, and is a light one otherwise. The first of the two in the order for
the epoch leads; if it stays silent for TAKE_OVER seconds, the other one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dshealthd import __version__
from dshealthd.core import state_writer
from dshealthd.core.schema import SchemaError
from dshealthd.core.sockets import listen_address
from dshealthd.core.timing import Backoff, happens
from dshealthd.probe.hung_jobs import Neighborhood
from dshealthd.probe.members.absences import MAINTENANCE
from dshealthd.probe.members.schedule import Timetable, epoch_at, jitter, root_order, spread
from dshealthd.probe.node import PREPARATION, ProbeState, ThisNode
from dshealthd.probe.observation import (
    ON_DEMAND,
    Backend,
    Observation,
    Outcome,
    Part,
    RoundKind,
    RoundPlan,
    RoundResult,
    Stage,
)
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import PeerError, Refusal, Rejection
from dshealthd.probe.peers.resolver import Resolver
from dshealthd.probe.peers.server import PeerServer
from dshealthd.probe.rounds.active_round import Decline, RoundReport
from dshealthd.probe.rounds.conclusion import combine
from dshealthd.probe.rounds.plan import DEADLINES, gpu_seconds, local_job, local_plan, steps_at
from dshealthd.probe.rounds.round import Handler, Rounds
from dshealthd.probe.verdicts.confirmation import Confirmations
from dshealthd.probe.verdicts.detector import Detector
from dshealthd.probe.workers.store import LocalStore

if TYPE_CHECKING:
    from dshealthd.probe.peers.credentials import Credentials
    from dshealthd.probe.verdicts.baseline import Baselines
    from dshealthd.probe.verdicts.planner import Confirmation

log = logging.getLogger(__name__)

TAKE_OVER = 2.0
"""Seconds of silence after which the other member leads, but at most a fifth of the period."""
IMPORT_RETRIES = Backoff(first=60.0, limit=3600.0)
"""Waits until torch's version is asked for again: each check of an environment reads all of it."""
LOCAL_EVERY = 60
"""Epochs between scheduled local rounds of one node."""
SAVE_EVERY = 300.0
"""Seconds between saves of the baselines."""
TRIES = 8
"""Attempts at an epoch's round while this node or another member is in an extra round."""
BUSY_TRIES = 4
"""Attempts at an extra round while another round is in progress."""
REQUESTED = 6.0
"""Seconds for a member to call another and report: three answers."""
BUSY_WAIT = 1.5
"""Seconds between these attempts."""


class Renamed(Exception):
    """This node has another name in the new list of members."""


class SlotRunner:
    """All rounds of one node. `confirmations` are the extra ones that its detector asks for."""

    def __init__(
        self,
        state: ProbeState,
        credentials: Credentials,
        baselines: Baselines,
        address: tuple[str, str],
    ) -> None:
        """`address` is this node's numeric address and its interface."""
        options, membership = state.options, state.local_membership.membership
        self._state, self._me = state, state.local_membership.me
        self.credentials, self.baselines = credentials, baselines
        self.confirmations = Confirmations(
            options.policy.confirmations_per_minute, self._confirm, state.monotonic
        )
        self.detector = Detector(
            self._me, membership.leaves, baselines, state.wall, state.absences.names
        )
        _, port = listen_address(options.peer.listen_address)
        resolver = Resolver(monotonic=state.monotonic)
        self.client = PeerClient(
            options.peer,
            self._me,
            lambda name: (name, port),
            credentials=credentials,
            resolver=resolver,
            monotonic=state.monotonic,
        )
        self.node = ThisNode(state, self.detector, address, self.client)
        self.rounds = Rounds(self.node, self._ended)
        self.server = PeerServer(
            options.peer,
            self._me,
            lambda: state.local_membership.membership.names,
            self._handlers(),
            credentials=credentials,
            monotonic=state.monotonic,
            resolver=resolver,
        )
        self._names = membership.names
        self._timetable = Timetable(membership.names, membership.leaves)
        self._recent: deque[Observation] = deque(maxlen=2 * TRIES)
        """Recent scheduled rounds, including those that came to nothing."""
        self._requested: set[tuple[str, ...]] = set()
        """Members of the rounds that this node leads for another member."""
        self._saved = state.monotonic()
        self._restored = False
        """Whether the saved baselines have been read, and may be replaced."""

    async def open(self) -> None:
        """Open the listener before the first slot; raises OSError."""
        await self.server.start()

    async def close(self) -> None:
        """Close everything that slots need, and save the baselines."""
        await self.rounds.close()
        await self.node.close()
        await self.server.close()
        await self.client.close()
        self._save()
        # Who comes next, under another name or after a restart, reads them.
        await state_writer.wait_until_written(state_writer.DEADLINE)

    def _save(self) -> None:
        """Write the baselines in the background, if they have changed."""
        if self._restored and self.baselines.changed:
            self._state.file.save(self.baselines.document())

    async def run(self) -> None:
        """Run one slot after another; return when this node's name changes."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._restore(), name="baselines")
                tasks.create_task(self.confirmations.work(), name="confirmations")
                tasks.create_task(
                    self._state.absences.keep_announcing(self.client, self._others), name="absences"
                )
                tasks.create_task(
                    self._state.hung_jobs.work(self._neighborhood()), name="hung jobs"
                )
                tasks.create_task(self._follow_members(), name="members")
                await self._epochs(tasks)
        except* Renamed:
            log.warning("probe: this node has another name in the new list of members")

    async def _restore(self) -> None:
        """Read the baselines of this software. Which torch it has is known once that is imported,
        which may have to wait for a file system; meanwhile rounds are light.
        """
        stamp, pool = f"dshealthd {__version__}", self._state.worker_pool
        if pool is not None:
            failures = 0
            while await pool.prepare(PREPARATION):
                failures += 1
                await asyncio.sleep(IMPORT_RETRIES.after(failures))
            stamp += f" torch {pool.about.get('torch', '')} cuda {pool.about.get('cuda', '')}"
        self.baselines.stamp = stamp
        try:
            self.baselines.restore(await self._state.file.load())
        except (SchemaError, OSError) as error:
            log.warning("probe: baselines start from scratch: %s", error)
        self._restored = True

    async def _epochs(self, tasks: asyncio.TaskGroup) -> None:
        """Start the slot of every epoch as this node's clock reaches it."""
        period = self._state.options.period
        last = self.node.epoch()
        while True:
            now = self._state.wall()
            await asyncio.sleep((epoch_at(now, period) + 1) * period - now)
            # Read from the clock, not counted up: after a suspend or a clock step the missed epochs
            # are skipped, as the peers are already past them.
            epoch = self.node.epoch()
            if epoch != last:
                last = epoch
                # Not awaited: a round may last into the next epoch, which must start on time.
                tasks.create_task(self._epoch(epoch), name=f"epoch {epoch}")

    async def _follow_members(self) -> None:
        """Apply each new list of members, half an epoch before its first rounds, as all nodes do.
        Raises Renamed if it gives this node another name.
        """
        again, period = self._state.again, self._state.options.period
        while True:
            now = self._state.wall()
            due = (epoch_at(now - period / 2, period) + 1.5) * period
            demanded = await happens(again, due - now)
            again.clear()
            if not await self._state.local_membership.refresh(again=demanded):
                continue
            if self._state.local_membership.me != self._me:
                raise Renamed
            membership = self._state.local_membership.membership
            for name in set(self._names) - set(membership.names):
                self.client.forget(name)
            self._names = names = membership.names
            self._timetable = Timetable(names, membership.leaves)
            self.detector.apply_members(membership.leaves)
            self._state.metrics.forget(names)
            self._state.absences.forget(names)

    def _neighborhood(self) -> Neighborhood:
        return Neighborhood(
            self._me,
            lambda: self._state.local_membership.membership.names,
            self._left_out,
            lambda name: self.client.call(name, "summary", {}),
            self._hold_light_round,
        )

    def _left_out(self, name: str) -> bool:
        return self._state.absences.absent(name) or any(
            suspect.part is Part.NODE and suspect.component == name
            for suspect in self.detector.suspects()
        )

    async def _hold_light_round(self, name: str) -> bool:
        """Run a light round with a member at once, outside the slots; return False if impossible.
        All nodes of a job lead such rounds at the same time, and each declines calls while it leads
        one: each node retries after a delay of its own.
        """
        for _ in range(TRIES):
            if self.credentials.off or self._state.absences.own_end():
                return False
            report = await self._lead(ON_DEMAND, (self._me, name), RoundKind.LIGHT)
            if report is not None and report.observation.reason != Decline.TESTING:
                return True
            await asyncio.sleep(BUSY_WAIT * (0.5 + spread(self._me) / 2**32))
        return False

    def _others(self) -> list[str]:
        return [name for name in self._names if name != self._me]

    async def _epoch(self, epoch: int) -> None:
        if self._state.absences.own_end():
            self._state.metrics.skip(MAINTENANCE)
            return
        pair = self._timetable.group_of(self._me, epoch)
        if pair:
            await self._in_pair(epoch, pair)
        else:
            self._state.metrics.skip("resting")
        # Each node has its own offset, so that not all GPUs of the cluster are busy in the same
        # epoch.
        if self._state.gpus.count() and (epoch + spread(self._me)) % LOCAL_EVERY == 0:
            await self._local(epoch)
        if self._state.monotonic() - self._saved > SAVE_EVERY:
            self._saved = self._state.monotonic()
            self._save()

    async def _in_pair(self, epoch: int, pair: Sequence[str]) -> None:
        order = root_order(pair, epoch)
        begin = (
            epoch * self._state.options.period
            + jitter(epoch, pair, self._state.options.period)
            + min(TAKE_OVER, self._state.options.period / 5) * order.index(self._me)
        )
        await asyncio.sleep(max(0.0, begin - self._state.wall()))
        if self.rounds.takes_part_in(epoch, pair) or self._had(epoch, pair):
            return  # even the first in the order: the others' clocks may be ahead of its own
        if self.credentials.off:
            self._state.metrics.skip("switched_off")
            return
        partner = next(name for name in pair if name != self._me)
        if self._state.absences.absent(partner):
            self._state.metrics.skip(MAINTENANCE)
            return
        for attempt in range(TRIES):  # another round may be in progress here or there
            # Beside one that still is when half of the epoch is over, an echo can run.
            kind = RoundKind.LIGHT if attempt >= TRIES / 2 else None
            report = await self._lead(epoch, (self._me, partner), kind)
            if report is not None and report.observation.reason != Decline.TESTING:
                return
            await asyncio.sleep(self._state.options.period / TRIES)
            had = any(round.reason != Decline.TESTING for round in self._had(epoch, pair))
            if had or self.rounds.takes_part_in(epoch, pair):
                return
            if self.node.epoch() != epoch:
                break
        if report is None:
            self._state.metrics.skip(Decline.TESTING)

    def _had(self, epoch: int, pair: Sequence[str]) -> list[Observation]:
        """Return the rounds that a pair has had in an epoch, those that came to nothing
        included.
        """
        return [
            round
            for round in self._recent
            if round.epoch == epoch and set(round.members) == set(pair)
        ]

    async def _lead(
        self,
        epoch: int,
        members: tuple[str, ...],
        kind: RoundKind | None = None,
        steps: tuple[tuple[int, int], ...] | None = None,
    ) -> RoundReport | None:
        """Lead a round of the kind that is possible now. `kind` and `steps` default to the
        schedule's. Return None if this node is in another round.
        """
        gpus = self._state.gpus.count()
        # The same for two epochs, as one is inside leaves and one between them.
        kind = kind or (RoundKind.RAIL if gpus > 1 and epoch // 2 % 2 else RoundKind.PAIR)
        backend = Backend.NCCL if gpus else Backend.GLOO
        plan = RoundPlan(
            epoch=epoch,
            kind=kind,
            backend=backend,
            members=members,
            digest=self._state.local_membership.membership.digest,
            steps=steps or steps_at(max(epoch, 0), self._state.options.large_every, backend),
            ranks=gpus or 1,
        )
        if plan.kind is RoundKind.LIGHT:
            return await self.rounds.lead(plan.light())
        reason = (
            await self.node.objection(plan)
            if steps is not None
            else await self.node.obstacle(scheduled=epoch != ON_DEMAND)
        )
        return await self.rounds.lead(plan.light() if reason else plan, reason)

    def _handlers(self) -> Mapping[str, Handler]:
        """Return the handlers of other members' calls, by method."""
        return {
            **self.rounds.handlers(),
            "invite": self._invited,
            "absent": self._state.absences.answer,
            "summary": self._summarize,
            "lead": self._lead_on_demand,
        }

    async def _invited(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        """Take part in another node's round; in maintenance, only in one on demand."""
        if body["plan"].epoch != ON_DEMAND:
            # A leader of scheduled rounds is not in maintenance.
            self._state.absences.record(sender, 0.0)
            if self._state.absences.own_end():
                raise Refusal(MAINTENANCE)
        return await self.rounds.invited(sender, body)

    async def _lead_on_demand(self, _sender: str, body: dict[str, Any]) -> dict[str, Any]:
        members, kind = body["members"], body["kind"]
        if members[0] != self._me or members[1] == self._me or kind is RoundKind.LOCAL:
            raise Refusal(Rejection.MALFORMED)
        if not set(members) <= set(self._names):
            raise Refusal(Decline.MEMBERS)
        self._requested.add(members)
        try:
            report = await self._lead(ON_DEMAND, members, kind, body["steps"])
        finally:
            self._requested.discard(members)
        if report is None:
            raise Refusal(Decline.TESTING)
        return {"observation": report.observation}

    async def _summarize(self, _sender: str, _body: dict[str, Any]) -> dict[str, Any]:
        return self._state.summary()

    async def _confirm(self, confirmation: Confirmation) -> bool:
        """Run an extra round that the detector asked for. Return False if this node was busy with
        another one for too long, or a member is in maintenance.
        """
        if self._state.absences.own_end() or any(
            map(self._state.absences.absent, confirmation.members)
        ):
            self.detector.withdraw(confirmation)
            return False
        for _ in range(BUSY_TRIES):
            if confirmation.kind is RoundKind.LOCAL:
                if not self.rounds.busy:
                    await self._local(ON_DEMAND)
                    return True
            elif confirmation.members[0] != self._me:
                reason = await self._request_call(*confirmation.members)
                if not reason:
                    return True
                if reason != Decline.TESTING:
                    break
            elif await self._lead(ON_DEMAND, confirmation.members, confirmation.kind) is not None:
                return True
            await asyncio.sleep(BUSY_WAIT)
        self.detector.withdraw(confirmation)
        return False

    async def _request_call(self, name: str, other: str) -> str:
        """Have a member call another that this node cannot call. Return why it does not, or
        empty.
        """
        body = {"members": [name, other], "kind": RoundKind.LIGHT, "steps": []}
        try:
            answer = await self.client.call(name, "lead", body, REQUESTED)
        except PeerError as error:
            return error.reason
        told, now = answer["observation"], self._state.wall()
        self._observe(replace(told, epoch=ON_DEMAND, members=(name, other), at=now))
        return ""

    async def _local(self, epoch: int) -> None:
        gpus, begin = self._state.gpus.count(), self._state.monotonic()
        plan = local_plan(self._me, gpus, epoch)
        reason = await self.node.obstacle(scheduled=epoch != ON_DEMAND)
        if reason:
            findings = RoundResult(Outcome.DECLINED, Stage.INVITE, reason=reason)
            self._state.metrics.skip(reason)
        else:
            work = local_job(gpus, steps_at(0, 1, Backend.NCCL), DEADLINES)
            results = await self.node.run(work, LocalStore(), lambda _rank, _stage: None)
            self._state.metrics.record_checksums(results)
            findings = combine(plan, self._me, {self._me: tuple(results)})
        observation = findings.observation(plan, None, self._state.wall())
        self._ended(RoundReport(observation, plan, self._state.monotonic() - begin, led=True))

    def _ended(self, report: RoundReport) -> None:
        """Process a finished round; one that an absent member made fail counts as declined."""
        observation = report.observation
        if any(map(self._state.absences.absent, observation.late)):
            observation = replace(observation, outcome=Outcome.DECLINED, reason=MAINTENANCE)
            report = replace(report, observation=observation)
        self._state.metrics.add(report, self._me)
        if observation.epoch != ON_DEMAND:
            self._recent.append(observation)
        if observation.backend == Backend.NCCL:
            if observation.timings:
                self._state.policy.spend(
                    gpu_seconds(report.plan, observation.timings),
                    scheduled=observation.epoch != ON_DEMAND,
                )
            elif not report.led and observation.outcome is not Outcome.DECLINED:
                self._state.policy.spend_in_vain(report.seconds)
        level = (
            logging.DEBUG
            if observation.outcome in {Outcome.OK, Outcome.DECLINED}
            else logging.WARNING
        )
        log.log(
            level,
            "probe: %s round of %s: %s",
            observation.kind,
            ", ".join(observation.members),
            _words(observation),
        )
        requested = observation.epoch == ON_DEMAND and observation.members in self._requested
        self._observe(observation, requested=requested)

    def _observe(self, observation: Observation, *, requested: bool = False) -> None:
        """Have the detector evaluate a round, and queue the extra round that it needs, if any."""
        for needed in self.detector.observe(observation, requested=requested):
            if not self.confirmations.add(needed):
                self.detector.withdraw(needed)


def _words(observation: Observation) -> str:
    late = f" (late: {', '.join(observation.late)})" if observation.late else ""
    reason = f", {observation.reason}" if observation.reason else ""
    return f"{observation.outcome} at {observation.stage}{late}{reason}"
