"""The worker pool: runs the workers of a round, forked by one fork server.

It starts workers, serves their store operations, ends late ones, and reports how each ended.

The fork server (the *parent*) starts with the first round and ends after a while without rounds:
importing torch takes 200 MiB and one to three seconds, a fork some milliseconds. The agent itself
does not import torch and has no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core.child import KILL_DEADLINE, StartError, cause, channel, how_ended
from dshealthd.core.collector import Sample, gauge
from dshealthd.core.text import plural
from dshealthd.core.timing import Backoff, happens
from dshealthd.linux.starvation import STARVED, LoopLag, run_queue
from dshealthd.probe.observation import Outcome, Stage
from dshealthd.probe.workers.fork_server import (
    PARENT,
    PROGRAM,
    ForkedWorker,
    ForkServer,
    ForkServerError,
    StatusPage,
)
from dshealthd.probe.workers.job import RankResult, RankSpec, WorkerJob
from dshealthd.probe.workers.session import NodeWorkers, WorkerSession

if TYPE_CHECKING:
    from dshealthd.probe.workers.store import StoreHandler

log = logging.getLogger(__name__)

PARENT_UP = gauge(
    "dshealthd_probe_parent_up", "1 while the fork server of the probe workers is running."
)
STUCK = gauge(
    "dshealthd_probe_workers_stuck",
    "Probe workers hung in the kernel that cannot be killed.",
    "device",
)


class WorkerPool:
    """This node's workers and their fork server."""

    def __init__(
        self,
        python: str,
        idle_seconds: float,
        monotonic: Callable[[], float],
        *,
        environment: Mapping[str, str] | None = None,
        program: str = PROGRAM,
        backoff: Backoff | None = None,
    ) -> None:
        """Prepare; nothing starts before the first round. `python` is the interpreter of the
        training environment; `environment` holds the variables that it needs (LD_LIBRARY_PATH,
        NCCL_…), from the configuration; `program` is the worker's file.
        """
        self._python = python
        self._idle_seconds = idle_seconds
        self._monotonic = monotonic
        self._environment = dict(environment or {})
        self._program = program
        self._backoff = backoff or Backoff()
        self._parent: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._running = 0
        self._idle: asyncio.TimerHandle | None = None
        self._stuck: dict[str, ForkedWorker] = {}
        self._trouble: tuple[ForkServerError, int, float] | None = None
        self._own_failure = ""

    async def run(
        self, job: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> list[RankResult]:
        """Run this node's ranks of a round and return one result for each, in order. Every failure
        becomes a result. Canceling this kills the workers.
        """
        for rank_spec in job.rank_specs:
            progress(rank_spec.rank, Stage.IMPORT)
        try:
            with self._in_use():
                parent = await self._ready(job.deadlines[Stage.IMPORT])
                round_ = NodeWorkers(job, store, progress)
                async with asyncio.TaskGroup() as tasks:
                    running = [
                        tasks.create_task(self._attend(parent, rank_spec, round_))
                        for rank_spec in job.rank_specs
                    ]
                results = [task.result() for task in running]
                # A rank that ran, and hung or computed wrongly, is no worker that cannot run.
                unable = (
                    result.detail
                    for result in results
                    if result.outcome is Outcome.FAILED and result.stage is Stage.IMPORT
                )
                self._own_failure = next(unable, "")
                return results
        except ForkServerError as error:
            outcome = Outcome.HUNG if error.reason == "deadline" else Outcome.FAILED
            return [
                _failed(rank_spec, outcome, error.reason, str(error))
                for rank_spec in job.rank_specs
            ]

    async def prepare(self, deadline: float) -> str:
        """Start the pool's fork server, so that no round has to wait for the import of torch.
        Return the slug of the failure, or "".
        """
        try:
            with self._in_use():
                await self._ready(deadline)
        except ForkServerError as error:
            return error.reason
        return ""

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the fork server meanwhile, and for a while after the last use."""
        self._running += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._retire)

    @property
    def ready(self) -> bool:
        """Whether the pool can fork a worker at once."""
        return self._parent is not None and self._parent.usable and bool(self._parent.about)

    @property
    def about(self) -> Mapping[str, Any]:
        """Versions (`torch`, `cuda`, `python`) of the pool's environment, how many `gpus` it can
        use, and the fork server's pid (`ready`); empty without one that is ready.
        """
        return self._parent.about if self._parent is not None else {}

    def no_gpus(self, gpus: int) -> str:
        """Return why the workers cannot use this node's `gpus` GPUs; empty if they can, or if that
        is not known because no fork server is ready.
        """
        about = self.about
        if not about or about["gpus"] >= gpus:
            return ""
        few = f"torch can use {about['gpus']} of {plural(gpus, 'GPU')}"
        return f"{few}: {about['no_gpus']}" if about["no_gpus"] else few

    def problem(self, gpus: int) -> str:
        """Return what keeps this node's own workers from running, as a text for a person; empty if
        nothing is known to. `gpus`: GPUs of this node.
        """
        trouble = str(self._trouble[0]) if self._trouble is not None else ""
        return trouble or self.no_gpus(gpus) or self._own_failure

    async def close(self) -> None:
        """End the pool's fork server, and with it every worker."""
        if self._idle is not None:
            self._idle.cancel()
        parent, self._parent = self._parent, None
        if parent is not None:
            parent.kill()
            await happens(parent.ended, KILL_DEADLINE)

    def samples(self) -> Iterator[Sample]:
        """Yield the worker pool's own metrics."""
        yield PARENT_UP(float(self._parent is not None and self._parent.usable))
        for device, worker in self._stuck.items():
            yield STUCK(float(not worker.ended.is_set()), device)

    async def _ready(self, deadline: float) -> ForkServer:
        async with self._starting:
            if self._parent is not None and self._parent.usable:
                return self._parent
            if self._trouble is not None and self._monotonic() < self._trouble[2]:
                raise self._trouble[0]
            parent = None
            try:
                parent = self._parent = self._new_parent()
                await parent.ready(deadline)
            except ForkServerError as error:
                failures = self._trouble[1] + 1 if self._trouble is not None else 1
                self._trouble = (error, failures, self._monotonic() + self._backoff.after(failures))
                log.warning("probe: %s", error)
                raise
            finally:
                if parent is not None and not parent.about:
                    parent.kill()  # also when this call was cancelled
                    self._parent = None
            self._trouble = None
            if parent.about["threads"] > 1:
                log.warning(
                    "probe: importing torch leaves %d threads, so workers cannot be forked; "
                    "starting each as a new process is slow",
                    parent.about["threads"],
                )
            return parent

    def _new_parent(self) -> ForkServer:
        try:
            return ForkServer(self._python, self._program, self._environment)
        except StartError as error:
            raise ForkServerError(PARENT, str(error)) from error

    def _retire(self) -> None:
        self._idle = None
        if self._parent is not None and not self._running:
            self._parent.kill()
            self._parent = None

    async def _attend(
        self, parent: ForkServer, rank_spec: RankSpec, round_: NodeWorkers
    ) -> RankResult:
        stuck = self._stuck.get(rank_spec.device)
        if stuck is not None and not stuck.ended.is_set():
            round_.hurry()
            return _failed(
                rank_spec,
                Outcome.INCONCLUSIVE,
                "busy",
                f"process {stuck.pid}, an earlier worker on {rank_spec.device}, cannot be killed",
            )
        # To tell later whether a fork server that missed its deadline was starved of CPU.
        before = run_queue(parent.pid)
        with contextlib.ExitStack() as held:
            lag = held.enter_context(LoopLag())
            try:
                board = StatusPage()
                held.callback(board.close)
                with channel(f"the worker of {rank_spec.device}") as (ours, theirs):
                    held.callback(ours.close)
                    worker = await parent.fork(theirs.fileno(), board.descriptor)
            except OSError as error:
                round_.hurry()
                return _failed(
                    rank_spec,
                    Outcome.INCONCLUSIVE,
                    PARENT,
                    f"cannot start a worker: {cause(error)}",
                )
            except ForkServerError as error:
                if not round_.failed.done():
                    log.warning("probe: %s", error)
                round_.hurry()
                after = run_queue(parent.pid)
                if lag.starved or (before and after and after.since(before).starved):
                    return _failed(rank_spec, Outcome.INCONCLUSIVE, STARVED, str(error))
                return _failed(rank_spec, Outcome.FAILED, error.reason, str(error))
            try:
                one = WorkerSession(rank_spec, worker, round_, lambda: board.counters()[1])
                await one.follow(ours)
                # Before the kill, which removes its /proc entry.
                queue = run_queue(worker.pid)
            finally:
                worker.kill()
            if one.outcome is not Outcome.OK:
                round_.hurry()
            # Remembered by device: another worker on it would only hang too.
            if not await worker.gone(KILL_DEADLINE):
                self._stuck[rank_spec.device] = worker
                log.error("probe: worker %d on %s cannot be killed", worker.pid, rank_spec.device)
                one.reason, one.detail = (
                    "unkillable",
                    f"{one.detail}; process {worker.pid} cannot be killed".lstrip("; "),
                )
            elif one.reason == "exited":
                one.reason, one.detail = describe_exit(worker, board)
            if lag.starved or (queue and queue.starved):
                one.starve()
            entered, left = board.counters()
            return one.result(entered, left)


def _failed(rank_spec: RankSpec, outcome: Outcome, reason: str, detail: str) -> RankResult:
    return RankResult(
        rank=rank_spec.rank, outcome=outcome, stage=Stage.IMPORT, reason=reason, detail=detail
    )


def describe_exit(worker: ForkedWorker, board: StatusPage) -> tuple[str, str]:
    """Return the reason and detail for a worker of the pool that ended without a report."""
    printed = board.printed()
    words = f": {printed}" if printed else ""
    if worker.status is None:
        return "parent", f"process {worker.pid} ended with the workers' fork server{words}"
    code = os.waitstatus_to_exitcode(worker.status)
    return "killed" if code < 0 else "exited", f"process {worker.pid} {how_ended(code)}{words}"
