"""A member of a cluster that lies: a real agent's probes, of which only the words are changed.

What it sends, what its workers do and whom it answers follow one of the strategies of
`probe_liars`. One that is `honest` leads as many rounds as one that frames, and tells the truth.
Its credentials are its own, so it speaks in nobody else's name.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from bench.probe_liars import CREEP, FAST, FORGED, TURN, WAYS
from dshealthd.probe.observation import Kind, Op, Outcome, Stage, Timing
from dshealthd.probe.peers.protocol import PREFIX, PeerError
from dshealthd.probe.rounds.plan import DEADLINES, ON_DEMAND
from dshealthd.probe.service import ProbeService
from dshealthd.probe.workers.job import RankResult
from dshealthd.probe.workers.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dshealthd.core.collector import Sample
    from dshealthd.probe.slots import SlotRunner
    from dshealthd.probe.workers.job import RankSpec, WorkerJob
    from dshealthd.probe.workers.store import StoreHandler
    from dshealthd.probe.workers.worker_pool import WorkerPool

JITTER = 0.015
"""Standard deviation of a collective's time, as in the simulator."""
LATENCY, BANDWIDTH = 20e-6, 40e9
"""Seconds of the smallest collective, and bytes a second of large ones."""
SLOW = 1.3
"""How much longer a liar that is slow takes."""
DEAF = 20.0
"""Seconds for which a call that a liar does not answer stays open; the caller gives up before."""
UNANSWERED = 2.0
"""Seconds after which a call through a cut link is given up."""
AHEAD = 900
"""Collectives that a liar says it has come through."""
_RESET = b""

SAID: Mapping[str, tuple[Outcome, Stage, str]] = {
    "hung": (Outcome.HUNG, Stage.SIZES, "deadline"),
    "corrupted": (Outcome.CORRUPTED, Stage.VERIFY, "wrong_data"),
    "failed": (Outcome.FAILED, Stage.INIT, "connection_lost"),
    "unreachable": (Outcome.UNREACHABLE, Stage.INVITE, "connect_timeout"),
}
"""How a root that lies says that a round with its victim has ended."""


class PlayedWorkers:
    """Workers whose collectives are played: no fabric, but the real store of the round.

    Each rank tells the others its time of a step and takes the longest, as an all-reduce does. So a
    liar can make a step longer, wrong or endless for its partners, and cannot make it shorter.
    """

    ready = True
    about: Mapping[str, Any] = {"torch": "played", "cuda": "played"}

    def __init__(self, seed: int, way: Callable[[], str] = lambda: "well") -> None:
        """`way` says how the steps go wrong that these workers take part in."""
        self._random = random.Random(seed)
        self._way = way

    async def prepare(self, _deadline: float) -> str:
        """Be ready."""
        return ""

    def no_gpus(self, _gpus: int) -> str:
        """Have a torch that can use all GPUs."""
        return ""

    def problem(self, _gpus: int) -> str:
        """Have no problem."""
        return ""

    def samples(self) -> Iterator[Sample]:
        """Yield nothing."""
        return iter(())

    async def close(self) -> None:
        """There is nothing to close."""

    async def run(
        self, job: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> list[RankResult]:
        """Run the ranks of one node."""
        way = self._way()
        ranks = (self._rank(job, spec, store, progress, way) for spec in job.rank_specs)
        return list(await asyncio.gather(*ranks))

    async def _rank(
        self,
        job: WorkerJob,
        spec: RankSpec,
        store: StoreHandler,
        progress: Callable[[int, Stage], None],
        way: str,
    ) -> RankResult:
        place = spec.rank if spec.group_rank is None else spec.group_rank
        others = [n for n in range(spec.group_size or job.world_size) if n != place]
        timings: list[Timing] = []
        stage, entered, left = Stage.STORE, 0, 0

        def ended(outcome: Outcome, reason: str = "") -> RankResult:
            return RankResult(
                rank=spec.rank,
                outcome=outcome,
                stage=Stage.DONE if outcome is Outcome.OK else stage,
                reason=reason,
                timings=tuple(timings) if outcome is Outcome.OK else (),
                entered=entered,
                left=left,
            )

        async def exchange(step: str, value: bytes) -> list[bytes]:
            await store("set", f"{spec.group}/{step}/{place}", value, DEADLINES[stage])
            found = [
                await store("get", f"{spec.group}/{step}/{other}", None, DEADLINES[stage])
                for other in others
            ]
            return [each for each in found if isinstance(each, bytes)]

        try:
            progress(spec.rank, stage)
            await exchange("here", b"1")
            stage = Stage.INIT
            progress(spec.rank, stage)
            if _RESET in await exchange("init", _RESET if way == "failed" else b"1"):
                return ended(Outcome.FAILED, "connection_lost")
            stage = Stage.SIZES
            progress(spec.rank, stage)
            wrong = way == "corrupted"
            for number, (size, _) in enumerate(job.steps):
                entered += 1
                if way == "hung" and number == 1:
                    return ended(Outcome.HUNG, "deadline")  # and its partners wait for the deadline
                mine = (LATENCY + size / BANDWIDTH) * (1 + self._random.gauss(0.0, JITTER))
                if way in {"slow", "creep"}:
                    mine *= SLOW if way == "slow" else CREEP
                told = struct.pack("d", math.nan if wrong else mine)
                times = [struct.unpack("d", each)[0] for each in await exchange(str(number), told)]
                wrong = wrong or any(map(math.isnan, times))
                seconds = mine if wrong else max(mine, *times, 0.0)
                timings.append(Timing(Op.ALL_REDUCE, size, seconds, size / seconds, spec.part))
                left += 1
            stage = Stage.VERIFY
            progress(spec.rank, stage)
        except TimeoutError:
            return ended(Outcome.HUNG, "deadline")
        except StoreError:
            return ended(Outcome.FAILED, "store")
        return ended(Outcome.CORRUPTED, "wrong_data") if wrong else ended(Outcome.OK)


class PlayedService(ProbeService):
    """The probes of an agent whose collectives are played."""

    def play(self, workers: PlayedWorkers) -> None:
        """Use these workers; before the start."""
        self._state = replace(self._state, worker_pool=cast("WorkerPool", workers))

    @property
    def running(self) -> SlotRunner | None:
        """Its rounds; None until it has begun."""
        return self._running


class Liar:
    """Makes the probes of one agent lie."""

    def __init__(
        self, service: PlayedService, me: str, strategy: str, victims: Sequence[str]
    ) -> None:
        self._service, self._me, self._strategy = service, me, strategy
        self._victims = frozenset(victims)
        self._first: int | None = None
        self.lies: int = 0
        """Messages that were changed, calls that got no answer, steps that were spoilt."""
        self.forged: int = 0
        """Rounds that it led beside the schedule, and that its victim took part in."""

    @property
    def _running(self) -> SlotRunner:
        assert self._service.running is not None
        return self._service.running

    @property
    def _turn(self) -> int:
        """Epochs since it began to lie."""
        epoch = self._running.node.epoch()
        self._first = epoch if self._first is None else self._first
        return epoch - self._first

    @property
    def _way(self) -> str:
        return WAYS[self._turn // TURN % len(WAYS)]

    def _meant(self, members: Sequence[str]) -> bool:
        """Tell whether a round with these members is one to spoil."""
        return self._strategy in {"frame", "collude"} and bool(self._victims & set(members))

    def spoils(self) -> str:
        """Return how its workers spoil the round that they are in."""
        if self._service.running is None:
            return "well"
        active = self._running.rounds._current  # noqa: SLF001 - the liar's own agent
        members = active.plan.members if active is not None else ()
        way = "well"
        if self._strategy == "poison" and self._turn % 2 == 0:
            way = "creep"
        elif self._meant(members) and self._turn % 2 == 0:
            way = self._way  # in every other epoch it only says so
        self.lies += way in {"creep", "slow", "hung", "corrupted", "failed"}
        return way

    def begin(self) -> None:
        """Lie from now on."""
        running = self._running
        honest = running.client.call

        async def call(
            peer: str, method: str, body: Mapping[str, Any], deadline: float
        ) -> dict[str, Any]:
            told = self._message(peer, method, body)
            if told is None:
                self.lies += 1
                return {}
            self.lies += told != body
            return await honest(peer, method, told, deadline)

        running.client.call = call  # type: ignore[method-assign] # what it sends
        handlers = running.server._handlers  # noqa: SLF001 - the liar's own agent
        for method in ("invite", "echo", "result", "store", "conclusion"):
            name, handler, typed = handlers[PREFIX + method]

            async def answer(
                sender: str, body: dict[str, Any], handler: Any = handler
            ) -> dict[str, Any]:
                if self._deaf(sender):
                    self.lies += 1
                    await asyncio.sleep(DEAF)
                found: dict[str, Any] = await handler(sender, body)
                if "scores" in found and self._strategy != "honest":
                    found["scores"] = self._scores()
                return found

            handlers[PREFIX + method] = (name, answer, typed)

    def _deaf(self, sender: str) -> bool:
        """Tell whether a member's calls get no answer now."""
        if self._strategy == "silence":
            number = int(sender.rpartition(".")[2])
            return bool((number + self._turn // 2) % 2)
        if self._strategy == "slander":
            return sender in self._victims and self._turn // TURN % 2 == 1
        return self._meant((sender,)) and self._way == "unreachable"

    # What it says

    def _message(self, peer: str, method: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what it sends in place of a message; None: nothing, and it acts as if it had."""
        if self._strategy == "silence" and method == "invite" and self._deaf(peer):
            return None
        if self._strategy == "honest":
            return body
        if method == "invite" and self._strategy != "silence":
            return {**body, "scores": self._scores()}
        if method not in {"result", "conclusion"}:
            return body
        told = dict(body)
        if self._strategy != "silence":
            told["scores"] = self._scores()
        if self._strategy == "poison":
            factor = FAST if self._turn % 2 else CREEP
            echo = {"op": Op.ECHO, "size": 0, "seconds": 2e-6, "bus_bandwidth": 0.0, "part": ""}
            timings = [echo] if body.get("kind") is Kind.LIGHT else body["timings"]
            return told | {"timings": _scaled(timings, factor)}
        active = self._running.rounds._parts.get(body["round"])  # noqa: SLF001 - its own agent
        if active is None or not self._meant(active.plan.members):
            return told
        if self._way == "slow":
            return told | {"timings": _scaled(body["timings"], SLOW)}
        if self._way not in SAID:
            return told
        outcome, stage, reason = SAID[self._way]
        if method == "conclusion":
            told |= {"outcome": outcome, "stage": stage, "reason": reason}
        spoilt = {"outcome": outcome, "reason": reason, "entered": AHEAD, "left": AHEAD}
        told["ranks"] = [{**rank, **spoilt} for rank in body["ranks"]]
        return told

    def _scores(self) -> list[dict[str, Any]]:
        """Return what it says of itself, that it is well, and of others, that they are not."""
        me = self._me
        said: dict[str, float] = {me: 1.0}
        for name in self._running.node.membership().names:
            if name != me:
                value = 1000.0 if name in self._victims else 1.0
                said |= {f"{me}--{name}": value, f"{me}->{name}": value}
                if name in self._victims:
                    said[name] = value
        if self._turn // TURN % 2:
            said |= {f"{me}/leaf": SLOW, f"{me}/0": SLOW}
        return [{"component": component, "score": score} for component, score in said.items()]

    # Rounds that nobody has asked for

    async def lead(self) -> None:
        """Lead rounds beside the schedule, until cancelled."""
        if self._strategy == "silence":
            return
        period = self._service.options.period
        victims, turn = sorted(self._victims), 0
        while True:
            await asyncio.sleep(period / FORGED)
            victim = victims[turn % len(victims)]
            kind = (Kind.PAIR, Kind.RAIL, Kind.LIGHT)[turn % 3]
            epoch = self._running.node.epoch() if turn % 2 else ON_DEMAND
            turn += 1
            try:
                report = await self._running._lead(epoch, (self._me, victim), kind)  # noqa: SLF001 - as above
            except PeerError:
                continue
            self.forged += report is not None and report.observation.outcome is not Outcome.DECLINED


def cut(service: PlayedService, other: str) -> None:
    """Have a member's calls to another get no answer."""
    assert service.running is not None
    client = service.running.client
    honest = client.call

    async def call(
        peer: str, method: str, body: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        if peer == other:
            await asyncio.sleep(min(deadline, UNANSWERED))
            raise PeerError(Outcome.UNREACHABLE, "connect_timeout")
        return await honest(peer, method, body, deadline)

    client.call = call  # type: ignore[method-assign] # its network


def _scaled(timings: Sequence[Mapping[str, Any]], factor: float) -> list[dict[str, Any]]:
    return [{**timing, "seconds": timing["seconds"] * factor} for timing in timings]
