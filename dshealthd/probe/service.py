"""The probes of one agent: who the members are, when rounds are due, what they come to.

Every epoch each node has one round, with the members that the schedule names. The GPUs are used where the policy lets them be; elsewhere
the round is a light one. Of a group the first in the order of its epoch leads; where it stays silent for TAKE_OVER seconds the next one
does. Who finds its partner gone looks for another one in the same epoch, so that the survivors of whatever happened are paired at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

from dshealthd import __version__
from dshealthd.address import listen_address
from dshealthd.collector import counter, gauge
from dshealthd.probe import background
from dshealthd.probe.baseline import BaselineError, Baselines, write
from dshealthd.probe.conclusion import Findings, Share, combine, timing_fields
from dshealthd.probe.confirmation import Confirmations
from dshealthd.probe.credentials import CredentialError, Credentials
from dshealthd.probe.interface import interface_of
from dshealthd.probe.job import DeviceSteps
from dshealthd.probe.messages import Backend
from dshealthd.probe.node import PREPARATION, ThisNode
from dshealthd.probe.nursery import Nursery
from dshealthd.probe.observation import Kind, Observation, Outcome, Stage
from dshealthd.probe.peer import Refusal
from dshealthd.probe.peer_client import PeerClient
from dshealthd.probe.peer_server import PeerServer
from dshealthd.probe.plan import DEADLINES, ON_DEMAND, PAIR, Plan, local_job, new_round, steps_at
from dshealthd.probe.policy import Account, Gpus, Policy
from dshealthd.probe.roll import Roll, hostname
from dshealthd.probe.round import Decline, Report, Rounds
from dshealthd.probe.schedule import epoch_at, root_order
from dshealthd.probe.store import LocalStore
from dshealthd.probe.tally import Tally
from dshealthd.probe.verdict import Judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dshealthd.collector import Sample
    from dshealthd.host import Host
    from dshealthd.probe.membership import Membership
    from dshealthd.probe.options import ProbeOptions
    from dshealthd.probe.verdict import Confirmation
    from dshealthd.snapshot import Snapshot

log = logging.getLogger(__name__)

UP = gauge("dshealthd_probe_up", "1 while probes with other nodes run, 0 while they cannot: no usable members, key or address.")
GPU_SECONDS = counter(
    "dshealthd_probe_gpu_seconds_total", "Time for which collectives of probes kept each GPU occupied; by their own timing."
)
SCORE = gauge(
    "dshealthd_probe_score_ratio", "This node's own score: median ratio of its timings to what is usual, over its last peers; 1 is usual."
)
METRICS = (UP, GPU_SECONDS, SCORE)

TAKE_OVER = 2.0
"""Seconds of silence after which the next member leads; a fifth of the period where that is shorter."""
JITTER = 1.0
"""Seconds over which the beginnings of the groups of an epoch are spread."""
SUBSTITUTES = 6
"""Other members that are tried where the partner is gone."""
GONE_FOR = 3
"""Epochs for which a member that was gone is not tried as a substitute."""
LOCAL_EVERY = 60
"""Epochs between two scheduled rounds among the GPUs of one node."""
SAVE_EVERY = 300.0
"""Seconds between two times that baselines are written."""
RETRY = 5.0
"""Seconds until the start is tried again."""
BUSY_TRIES = 4
"""Times that an extra round waits for the one in progress, a second and a half each."""
_SAMPLE_PEERS = 64
_GONE = frozenset({Outcome.UNREACHABLE, Outcome.REFUSED})


class Setup(Exception):
    """The probes cannot run yet; the message says why."""


class Service:
    """Runs the probes of this node until it is closed."""

    def __init__(
        self,
        options: ProbeOptions,
        *,
        host: Host,
        state: Path | None,
        snapshot: Snapshot,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        hostname: Callable[[], str] = hostname,
    ) -> None:
        """Prepare; nothing is read or opened before `start`. `state` is the directory for what outlives the agent."""
        self.options = options
        self._host = host
        self._state = state
        self._monotonic, self._wall = monotonic, wall
        self._roll = Roll(options.members, host, options.group_size, hostname, monotonic)
        self._gpus = Gpus(snapshot, monotonic)
        self._account = Account(options.policy.duty_ratio, monotonic)
        self._policy = Policy(options.policy, self._gpus, self._account, wall)
        self._nursery: Nursery | None = None
        if options.python is not None:
            self._nursery = Nursery(str(options.python), options.worker.idle_timeout, monotonic, environment=options.worker.variables)
        self._tally = Tally()
        self._confirmations = Confirmations(options.policy.confirmations_per_minute, self._confirm, monotonic)
        self._running: _Running | None = None
        self._task: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._problem = ""

    @property
    def membership(self) -> Membership:
        """The members as this agent believes them to be; LookupError while it does not know."""
        return self._roll.membership

    def start(self) -> None:
        """Begin, if the configuration asks for it."""
        if self.options.wanted and self._task is None:
            self._task = asyncio.create_task(self._run(), name="probes")
            self._task.add_done_callback(self._fallen)

    def reload(self) -> None:
        """Read the members again."""
        self._again.set()

    async def close(self) -> None:
        """End all rounds and close what is open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._nursery is not None:
            await self._nursery.close()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the probes; none where they are not configured."""
        if not self.options.wanted:
            return
        yield UP(float(self._running is not None))
        yield from self._roll.samples()
        running = self._running
        yield from self._tally.samples(running.judge.suspects() if running is not None else ())
        yield from self._confirmations.samples()
        yield GPU_SECONDS(self._account.used)
        if running is not None:
            score = running.judge.score()
            if score is not None:
                yield SCORE(score)
            yield from running.server.samples()
            yield from running.client.samples()
            yield from running.credentials.samples()
        if self._nursery is not None:
            yield from self._nursery.samples()

    def status(self) -> dict[str, Any]:
        """Return what the status document says of the probes."""
        if not self.options.wanted:
            return {"state": "off"}
        running, known = self._running, self._roll.known
        document: dict[str, Any] = {
            "state": "failing" if running is None else "ok",
            "detail": self._problem or "\n".join(self._roll.errors),
            "period_seconds": self.options.period,
            "epoch": epoch_at(self._wall(), self.options.period),
            "rounds": list(self._tally.rounds),
            "suspects": [],
        }
        if known:
            membership = self._roll.membership
            document |= {
                "name": self._roll.me,
                "members": len(membership.members),
                "hash": membership.digest,
                "source": membership.source,
                "peers": [{"name": name, "leaf": membership.leaves.get(name, "")} for name in membership.names[:_SAMPLE_PEERS]],
            }
        if running is not None:
            document["score"] = running.judge.score()
            document["suspects"] = [
                {"kind": suspect.part, "component": suspect.component, "reason": suspect.reason} for suspect in running.judge.suspects()
            ]
        return document

    def _fallen(self, task: asyncio.Task[None]) -> None:
        """Say that the probes have ended by a defect; the agent goes on without them."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem = f"ended by a defect: {error!r}"
            log.error("probe: %s", self._problem, exc_info=error)

    async def _run(self) -> None:
        """Set up, run, and where that is not possible try again."""
        while True:
            try:
                running = await self._set_up()
            except Setup as problem:
                if str(problem) != self._problem:
                    log.error("probe: %s", problem)
                self._problem = str(problem)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY):
                        await self._again.wait()
                self._again.clear()
                continue
            self._problem = ""
            self._running = running
            try:
                await running.run()
            finally:
                self._running = None
                await running.close()

    async def _set_up(self) -> _Running:
        """Read the members, the secrets and what is usual, and open the listener. Raises Setup."""
        await self._roll.look(again=True)
        if not self._roll.known:
            raise Setup("\n".join(self._roll.errors))
        options = self.options
        try:
            credentials = await background.call(lambda: Credentials(options.peer), PREPARATION, CredentialError, OSError)
            address = await background.call(self._address, PREPARATION, OSError)
        except (CredentialError, OSError) as error:  # TimeoutError is one
            raise Setup(str(error)) from error
        stamp = ""
        if self._nursery is not None and not await self._nursery.prepare(PREPARATION):
            about = self._nursery.about
            stamp = f"torch {about.get('torch', '')} cuda {about.get('cuda', '')}"
        baselines = Baselines(options.baseline, f"dshealthd {__version__} {stamp}".strip())
        await self._load(baselines)
        running = _Running(self, credentials, baselines, address)
        try:
            await running.open()
        except (OSError, ValueError) as error:
            await running.close()
            message = f"cannot listen on {options.peer.listen_address}: {error}"
            raise Setup(message) from error
        return running

    def _address(self) -> tuple[str, str]:
        """Return this node's address in numbers and its interface; in a thread."""
        host, _ = listen_address(self.options.peer.listen_address)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        address = str(ipaddress.ip_address(found))
        return address, self.options.worker.interface or interface_of(address, self._host)

    @property
    def _file(self) -> Path | None:
        return None if self._state is None else self._state / "probe-baselines.json"

    async def _load(self, baselines: Baselines) -> None:
        file = self._file
        if file is None:
            return
        try:
            await background.call(lambda: baselines.load(file), PREPARATION, BaselineError, OSError)
        except (BaselineError, OSError) as error:
            log.warning("probe: what is usual is learnt anew: %s", error)

    async def save(self, baselines: Baselines) -> None:
        """Keep what is usual, if it has changed."""
        file = self._file
        if file is None or not baselines.changed:
            return
        document = baselines.document()
        try:
            await background.call(lambda: write(file, document), PREPARATION, OSError)
        except OSError as error:
            baselines.changed = True
            log.warning("probe: what is usual could not be kept: %s", error)

    async def _confirm(self, confirmation: Confirmation) -> bool:
        running = self._running
        if running is None:
            return False
        done = await running.confirm(confirmation)
        if not done:
            running.judge.withdraw(confirmation)
        return done


class _Running:
    """Probes that are set up."""

    def __init__(self, service: Service, credentials: Credentials, baselines: Baselines, address: tuple[str, str]) -> None:
        options = service.options
        self.credentials = credentials
        self.baselines = baselines
        self._service = service
        self._options = options
        self._roll, self._gpus, self._account, self._tally = service._roll, service._gpus, service._account, service._tally  # noqa: SLF001 - one unit
        self._nursery = service._nursery  # noqa: SLF001
        self._monotonic, self._wall = service._monotonic, service._wall  # noqa: SLF001
        self._me = self._roll.me
        membership = self._roll.membership
        self.judge = Judge(self._me, _leaves(self._roll), baselines, options.verdict, self._wall)
        self.node = ThisNode(
            self._roll,
            service._policy,  # noqa: SLF001
            self._gpus,
            self._nursery,
            self.judge,
            address=address[0],
            interface=address[1],
            adapters=options.worker.adapters,
            period=options.period,
            extra_per_minute=options.policy.on_demand_per_minute,
            monotonic=self._monotonic,
            wall=self._wall,
        )
        _, port = listen_address(options.peer.listen_address)
        self.client = PeerClient(
            options.peer, self._me, lambda name: (name, port), credentials=credentials, monotonic=self._monotonic, wall=self._wall
        )
        self.rounds = Rounds(self.node, self.client, self._nursery, self._ended, monotonic=self._monotonic, wall=self._wall)
        self.server = PeerServer(
            options.peer,
            self._me,
            lambda: self._roll.membership,
            {**self.rounds.handlers(), "status": self._status, "lead": self._asked},
            credentials=credentials,
            monotonic=self._monotonic,
        )
        self._names = membership.names
        self._gone: dict[str, int] = {}
        self._met: deque[tuple[int, frozenset[str]]] = deque(maxlen=8)
        self._held: deque[tuple[int, frozenset[str]]] = deque(maxlen=8)
        """Those of them that were not declined for another round in progress."""
        self._saved = self._monotonic()

    async def open(self) -> None:
        """Open the listener; OSError."""
        await self.server.start()

    async def close(self) -> None:
        """Close everything, and keep what is usual."""
        await self.rounds.close()
        await self.node.close()
        await self.server.close()
        await self.client.close()
        await self._service.save(self.baselines)

    async def run(self) -> None:
        """Run an epoch after the other; returns when this node has another name."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._service._confirmations.work(), name="confirmations")  # noqa: SLF001
                await self._epochs(tasks)
        except* _Renamed:
            log.warning("probe: this node is another one in the new list of members")

    async def _epochs(self, tasks: asyncio.TaskGroup) -> None:
        """Begin every epoch that this node's clock comes to; raises _Renamed."""
        again, period = self._service._again, self._options.period  # noqa: SLF001
        last = epoch_at(self._wall(), period)
        while True:
            now = self._wall()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((epoch_at(now, period) + 1) * period - now):
                    await again.wait()
                    again.clear()
                    await self._look(again=True)
            epoch = epoch_at(self._wall(), period)
            if epoch != last:
                last = epoch
                await self._look()
                tasks.create_task(self._epoch(epoch), name=f"epoch {epoch}")

    async def _look(self, *, again: bool = False) -> None:
        """Take over a new list of members; raises _Renamed where this node is another one in it."""
        if await self._roll.look(again=again):
            if self._roll.me != self._me:
                raise _Renamed
            names = self._roll.membership.names
            for name in set(self._names) - set(names):
                self.client.forget(name)
            self._names = names
            self.judge.members(_leaves(self._roll))
            self._tally.forget(names)

    async def _epoch(self, epoch: int) -> None:
        """Have this node's round of an epoch."""
        group = self._roll.timetable.group_of(self._me, epoch)
        if group:
            await self._in_group(epoch, group)
        else:
            self._tally.skip("resting")
        if self._gpus.count() and (epoch + _spread(self._me)) % LOCAL_EVERY == 0:
            await self._local(epoch)
        if self._monotonic() - self._saved > SAVE_EVERY:
            self._saved = self._monotonic()
            await self._service.save(self.baselines)

    async def _in_group(self, epoch: int, group: Sequence[str]) -> None:
        place = root_order(group, epoch).index(self._me)
        begin = epoch * self._options.period + jitter(epoch, group, self._options.period) + min(TAKE_OVER, self._options.period / 5) * place
        await asyncio.sleep(max(0.0, begin - self._wall()))
        if self.rounds.joined(epoch, group) or (epoch, frozenset(group)) in self._met:
            return  # also the first one in the order: the others' clocks may be ahead of its own
        if self.credentials.off:
            self._tally.skip("switched_off")
            return
        members = (self._me, *(name for name in root_order(group, epoch) if name != self._me))
        report = await self._lead(epoch, members)
        for _ in range(BUSY_TRIES):  # an extra round may be in progress here or there
            if report is not None and report.observation.reason != Decline.TESTING:
                break
            await asyncio.sleep(self._options.period / (2 * BUSY_TRIES))
            if any(at == epoch and met == frozenset(group) for at, met in self._held):
                return
            report = await self._lead(epoch, members)
        if report is None:
            self._tally.skip(Decline.TESTING)
        elif report.observation.outcome in _GONE and len(group) == PAIR:
            await self._substitute(epoch, group)

    async def _substitute(self, epoch: int, group: Sequence[str]) -> None:
        """Find another partner, as the one that the schedule names is gone."""
        others = [name for name in self._roll.membership.names if name not in group and epoch - self._gone.get(name, -GONE_FOR) >= GONE_FOR]
        for name in sorted(others, key=lambda name: _affinity(epoch, self._me, name))[:SUBSTITUTES]:
            if (
                any(at == epoch and met != frozenset(group) for at, met in self._met)
                or epoch_at(self._wall(), self._options.period) > epoch
            ):
                return  # another one has found this node
            report = await self._lead(epoch, (self._me, name))
            if report is not None and report.observation.outcome is not Outcome.DECLINED and report.observation.outcome not in _GONE:
                return

    async def _lead(
        self, epoch: int, members: tuple[str, ...], kind: Kind | None = None, steps: tuple[tuple[int, int], ...] | None = None
    ) -> Report | None:
        """Lead a round of the kind that is possible now; `kind` and `steps` are the schedule's where they are not given."""
        gpus = self._gpus.count()
        plan = Plan(
            round=new_round(),
            epoch=epoch,
            kind=kind or _kind(epoch, len(members), gpus),
            backend=Backend.NCCL if gpus else Backend.GLOO,
            members=members,
            digest=self._roll.membership.digest,
            steps=steps_at(max(epoch, 0), self._options.large_every) if steps is None else steps,
            ranks=gpus or 1,
        )
        if plan.kind is Kind.LIGHT:
            return await self.rounds.lead(plan.light())
        reason = self.node.objection(plan) if steps is not None else self.node.obstacle(scheduled=epoch != ON_DEMAND)
        return await self.rounds.lead(plan.light() if reason else plan, reason)

    async def confirm(self, confirmation: Confirmation) -> bool:
        """Run an extra round; False where this node was in another one for too long."""
        for _ in range(BUSY_TRIES):
            if confirmation.kind is Kind.LOCAL:
                if not self.rounds.busy:
                    await self._local(ON_DEMAND)
                    return True
            elif await self._lead(ON_DEMAND, confirmation.members, confirmation.kind) is not None:
                return True
            await asyncio.sleep(1.5)
        return False

    async def _local(self, epoch: int) -> None:
        """Have a round among the GPUs of this node."""
        gpus, begin = self._gpus.count(), self._monotonic()
        backend = Backend.NCCL if gpus else Backend.GLOO
        plan = Plan(round=new_round(), epoch=epoch, kind=Kind.LOCAL, backend=backend, members=(self._me,), digest="", ranks=gpus or PAIR)
        reason = self.node.obstacle(scheduled=epoch != ON_DEMAND)
        if reason or self._nursery is None:
            findings = Findings(Outcome.DECLINED, Stage.INVITE, reason=reason)
            self._tally.skip(reason)
        else:
            steps = steps_at(0, 1)
            work = local_job(gpus, steps, device_steps=DeviceSteps() if gpus else None, deadlines=DEADLINES)
            results = await self._nursery.run(work, LocalStore(), lambda _rank, _stage: None)
            findings = combine(plan, {self._me: Share(tuple(results))}, {})
        observation = findings.observation(plan, self.node.scores(), self._wall())
        self._ended(Report(observation, plan, self._monotonic() - begin, led=True))

    def _ended(self, report: Report) -> None:
        """Take a round into account."""
        observation = report.observation
        self._tally.add(report, self._me)
        if observation.epoch != ON_DEMAND:
            self._met.append((observation.epoch, frozenset(observation.members)))
            if observation.reason != Decline.TESTING:
                self._held.append((observation.epoch, frozenset(observation.members)))
        if observation.backend == Backend.NCCL:
            now = self._monotonic()
            self._gpus.used(now - report.seconds, now)
            self._account.spend(report.plan.gpu_seconds(observation.timings))
        for name in observation.members:
            if name in observation.late and observation.outcome in _GONE:
                self._gone[name] = max(observation.epoch, self.node.epoch())
            else:
                self._gone.pop(name, None)
        level = logging.DEBUG if observation.outcome in {Outcome.OK, Outcome.DECLINED} else logging.WARNING
        log.log(level, "probe: %s round of %s: %s", observation.kind, ", ".join(observation.members), _words(observation))
        for dropped in self._service._confirmations.add(self.judge.observe(observation)):  # noqa: SLF001
            self.judge.withdraw(dropped)

    async def _asked(self, _sender: str, body: dict[str, Any]) -> dict[str, Any]:
        """Lead a round that a person asks for, at another node."""
        members, kind = body["members"], body["kind"]
        if members[0] != self._me or len(set(members)) != len(members) or kind is Kind.LOCAL:
            raise Refusal(Decline.MALFORMED)
        if not set(members) <= set(self._roll.membership.names):
            raise Refusal(Decline.MEMBERS)
        steps = tuple((step["size"], step["repetitions"]) for step in body["steps"])
        report = await self._lead(ON_DEMAND, members, Kind.GROUP if len(members) > PAIR and kind is Kind.PAIR else kind, steps)
        if report is None:
            raise Refusal(Decline.TESTING)
        found = report.observation
        return {
            **{name: getattr(found, name) for name in ("kind", "outcome", "stage", "late", "reason")},
            "backend": Backend(found.backend),
            "timings": timing_fields(found.timings),
        }

    async def _status(self, _sender: str, _body: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": __version__,
            "epoch": self.node.epoch(),
            "digest": self._roll.membership.digest,
            "suspects": [
                {"part": suspect.part, "component": suspect.component, "reason": suspect.reason}
                for suspect in self.judge.suspects()[:_SAMPLE_PEERS]
            ],
        }


class _Renamed(Exception):
    """This node is another one in the new list of members."""


def jitter(epoch: int, group: Iterable[str], period: float) -> float:
    """Return how many seconds after an epoch's begin a group starts: all its members know it, and no two groups need to agree."""
    digest = hashlib.blake2b(f"{epoch}/{'/'.join(sorted(group))}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32 * min(JITTER, period / 5)


def _affinity(epoch: int, one: str, other: str) -> bytes:
    """Return the order in which two members look for each other: the same seen from both sides."""
    return hashlib.blake2b(f"{epoch}/{'/'.join(sorted((one, other)))}".encode(), digest_size=8).digest()


def _spread(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def _kind(epoch: int, members: int, gpus: int) -> Kind:
    """Return the kind of a scheduled round. Two epochs in a row have the same, so that it is run inside leaves and between them."""
    if members > PAIR:
        return Kind.GROUP
    return Kind.RAIL if gpus > 1 and epoch // 2 % 2 else Kind.PAIR


def _leaves(roll: Roll) -> dict[str, str]:
    return {name: roll.membership.leaves.get(name, "") for name in roll.membership.names}


def _words(observation: Observation) -> str:
    late = f" (late: {', '.join(observation.late)})" if observation.late else ""
    reason = f", {observation.reason}" if observation.reason else ""
    return f"{observation.outcome} at {observation.stage}{late}{reason}"
