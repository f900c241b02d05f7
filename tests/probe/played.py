"""An agent's probes whose collectives are played: two cores have no fabric to time."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from dshealthd.core.collector import Sample
from dshealthd.probe.observation import Op, Outcome, Stage, Timing
from dshealthd.probe.rounds.plan import DEADLINES
from dshealthd.probe.service import ProbeService
from dshealthd.probe.slots import SlotRunner
from dshealthd.probe.workers.job import RankResult, RankSpec, WorkerJob
from dshealthd.probe.workers.store import StoreError, StoreHandler
from dshealthd.probe.workers.worker_pool import WorkerPool

JITTER = 0.015
"""Standard deviation of a collective's time, as in the simulator."""
LATENCY, BANDWIDTH = 20e-6, 40e9
"""Seconds of the smallest collective, and bytes a second of large ones."""


class PlayedWorkers:
    """Workers whose collectives are played: no fabric, but the real store of the round.

    Each rank tells the others its time of a step and takes the longest, as an all-reduce does.
    """

    ready = True
    about: Mapping[str, Any] = {"torch": "played", "cuda": "played"}

    def __init__(self, seed: int, way: Callable[[], str] = lambda: "well") -> None:
        """`way` says whether the workers go "well", or hang in the second step ("hung")."""
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
            await exchange("init", b"1")
            stage = Stage.SIZES
            progress(spec.rank, stage)
            for number, (size, _) in enumerate(job.steps):
                entered += 1
                if way == "hung" and number == 1:
                    return ended(Outcome.HUNG, "deadline")  # and its partners wait for the deadline
                mine = (LATENCY + size / BANDWIDTH) * (1 + self._random.gauss(0.0, JITTER))
                told = await exchange(str(number), struct.pack("d", mine))
                seconds = max(mine, *(struct.unpack("d", each)[0] for each in told))
                timings.append(Timing(Op.ALL_REDUCE, size, seconds, size / seconds, spec.part))
                left += 1
            stage = Stage.VERIFY
            progress(spec.rank, stage)
        except TimeoutError:
            return ended(Outcome.HUNG, "deadline")
        except StoreError:
            return ended(Outcome.FAILED, "store")
        return ended(Outcome.OK)


class PlayedService(ProbeService):
    """The probes of an agent whose collectives are played."""

    def play(self, workers: PlayedWorkers) -> None:
        """Use these workers; before the start."""
        self._state = replace(self._state, worker_pool=cast("WorkerPool", workers))

    @property
    def running(self) -> SlotRunner | None:
        """Its rounds; None until it has begun."""
        return self._running
