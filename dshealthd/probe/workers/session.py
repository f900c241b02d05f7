"""The agent's session with one worker: its stages, deadlines and result.

The job goes out; stages, timings and store operations come in; each stage has a deadline.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents, wire
from dshealthd.core.timing import time_limit
from dshealthd.linux.starvation import STARVED
from dshealthd.probe.observation import Outcome, Stage, Timing
from dshealthd.probe.workers import worker as worker_file
from dshealthd.probe.workers.job import Checksum, RankResult, RankSpec, WorkerJob
from dshealthd.probe.workers.store import StoreError, StoreHandler

if TYPE_CHECKING:
    import socket

    from dshealthd.probe.workers.fork_server import ForkedWorker

MORE = 3
"""Times that a stage gets its deadline again while its collectives go on: a link at a tenth of its
neighbors' speed is slow, not hung.
"""
GRACE = 1.0
"""Seconds for this node's other ranks to report after one failed; most lose connections."""
LAST_MOMENT = 2.0
"""Seconds that a worker which has closed its channel gets to exit with a status of its own."""
STORE_MARGIN = 2.0
"""Seconds by which the timeouts of store and backend exceed the longest stage's deadline, so that
the deadline ends a worker first.
"""
SECOND_LOOK = 0.5
"""Seconds after which a worker in uninterruptible sleep is looked at again: who waits for a page
from a busy disk is in it, too, but for a tenth of that: an estimate, as a disk answers in
milliseconds and a queue of requests in tens of them.
"""
MAX_FRAME = 1 << 20
STARVABLE = frozenset({"connection_lost", "deadline", "store", "timeout", "unkillable"})
"""Reasons that may come from a lack of CPU alone."""
_OUTCOMES = {"refused": Outcome.REFUSED, "no_route": Outcome.UNREACHABLE}
"""Outcomes of reasons that have one of their own."""


class NodeWorkers:
    """This node's workers in one round: one call of `WorkerPool.run`."""

    def __init__(
        self, job: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> None:
        """Hold the job of this node's sessions; no worker starts yet."""
        self.job, self.store, self.progress = job, store, progress
        self.failed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Set once a rank has failed, to the loop time at which the others' sessions end."""

    def hurry(self) -> None:
        """Cut all sessions of this node's ranks short, to `GRACE` seconds, as one has failed."""
        if not self.failed.done():
            self.failed.set_result(asyncio.get_running_loop().time() + GRACE)


class WorkerSession:
    """The agent's view of one worker as it goes through its stages."""

    def __init__(
        self,
        rank_spec: RankSpec,
        worker: ForkedWorker,
        round_: NodeWorkers,
        completed: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start with a forked worker that has not received its job yet. `completed` returns how
        many collectives the worker has left.
        """
        self.rank_spec, self.worker, self.round = rank_spec, worker, round_
        self._completed = completed
        self.stage = Stage.IMPORT
        self.outcome, self.reason, self.detail = Outcome.FAILED, "", ""
        self.timings: list[Timing] = []
        self.checksum: Checksum | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._over = False
        self._own = True
        """Whether the last deadline was the stage's own, not the end of a failed round."""

    def starve(self) -> None:
        """Make the session's result inconclusive if this node's own lack of CPU may explain it."""
        if self.reason in STARVABLE:
            self.outcome, self.detail = (
                Outcome.INCONCLUSIVE,
                f"this node is too busy to tell: {self.reason}, {self.detail}",
            )
            self.reason = STARVED

    def result(self, entered: int, left: int) -> RankResult:
        """Return the result of the worker's session."""
        return RankResult(
            rank=self.rank_spec.rank,
            outcome=self.outcome,
            stage=Stage.DONE if self.outcome is Outcome.OK else self.stage,
            reason=self.reason,
            detail=self.detail,
            timings=tuple(self.timings),
            entered=entered,
            left=left,
            part=self.rank_spec.part,
            checksum=self.checksum,
        )

    async def follow(self, channel: socket.socket) -> None:
        """Send the worker its job and process its messages until it ends or misses a deadline."""
        reader, writer = await asyncio.open_connection(sock=channel, limit=MAX_FRAME)
        try:
            writer.write(wire.pack(_description(self.round.job, self.rank_spec)))
            while True:
                seconds = (
                    worker_file.LINGER + 1.0 if self._over else self.round.job.deadlines[self.stage]
                )
                stage = asyncio.create_task(self._read_stage(reader, writer))
                try:
                    await self._wait_for(stage, seconds)
                    async with time_limit(0.0):
                        await stage
                finally:
                    stage.cancel()
                    await asyncio.gather(stage, return_exceptions=True)
        except TimeoutError:
            if not self._over:
                await self._judge_silence()
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self._over:
                self.reason = "exited"
                await self.worker.gone(LAST_MOMENT)
        except (*documents.MISSHAPEN, struct.error) as error:
            self._conclude(
                Outcome.FAILED, "malformed", f"the worker sent an invalid message: {error!r}"
            )
        finally:
            for request in self._requests:
                request.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)
            # Do not flush: the worker has ended, or is killed next.
            writer.transport.abort()

    async def _wait_for(self, stage: asyncio.Task[None], seconds: float) -> None:
        """Wait until a stage ends or its deadline is over, which comes anew as long as collectives
        have ended in the second half of it; no longer than a failed round lasts.
        """
        loop, failed = asyncio.get_running_loop(), self.round.failed
        both: set[asyncio.Future[Any]] = {stage, failed}
        for _ in range(1 + MORE):
            before = 0
            for _half in range(2):
                before, end = self._completed(), loop.time() + seconds / 2
                # Not awaited directly: frames that have arrived by the deadline are still
                # processed, in case it was the agent that was stopped.
                await asyncio.wait(both, timeout=seconds / 2, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    self._own = end <= failed.result()
                    end = min(end, failed.result())
                    await asyncio.wait({stage}, timeout=max(0.0, end - loop.time()))
                if stage.done() or not self._own:
                    return
            if self._completed() == before:
                return

    async def _read_stage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Process the worker's frames until one begins a stage or ends the round: either brings a
        new deadline.
        """
        while True:
            (size,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            message = json.loads(await reader.readexactly(size))
            if "store" in message:
                request = asyncio.create_task(self._serve(message, writer))
                self._requests.add(request)
                request.add_done_callback(self._requests.discard)
            elif "timing" in message:
                op, size, seconds, bandwidth = message["timing"]
                self.timings.append(
                    Timing(
                        str(op), int(size), float(seconds), float(bandwidth), self.rank_spec.part
                    )
                )
            elif "checksum" in message:
                library, number = message["checksum"]
                self.checksum = Checksum(_line(str(library)), int(number))
            else:
                break
        self.stage = Stage(message["stage"])
        if "end" in message:
            reason, outcome = str(message["reason"]), Outcome(message["end"])
            self._conclude(_OUTCOMES.get(reason, outcome), reason, _line(str(message["detail"])))
        else:
            self.round.progress(self.rank_spec.rank, self.stage)

    async def _serve(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number, value = message["id"], message["value"]
        answer: dict[str, Any]
        try:
            raw = base64.b64decode(value) if isinstance(value, str) else value
            done = await self.round.store(
                str(message["store"]),
                str(message["key"]),
                raw,
                float(message["timeout"]),  # it ends with the session, however long it is
            )
            answer = {"value": base64.b64encode(done).decode() if isinstance(done, bytes) else done}
        except TimeoutError:
            answer = {"error": "timeout"}
        except (StoreError, OSError, ValueError, ArithmeticError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if not writer.transport.is_closing():
            writer.write(wire.pack({"id": number, **answer}))

    async def _judge_silence(self) -> None:
        """Conclude a worker's session that missed its deadline. The process state tells a stuck
        worker from one that waits for another.
        """
        state = self.worker.state()
        if state == "D":
            await asyncio.sleep(SECOND_LOOK)
            state = self.worker.state()
        where = f"no progress in stage {self.stage}"
        process = f"{where}: process {self.worker.pid}"
        if state in {"T", "t"}:
            self._conclude(Outcome.HUNG, "stopped", f"{process} is stopped by a signal")
        elif state == "D":
            self._conclude(Outcome.HUNG, "uninterruptible", f"{process} hangs in the kernel")
        # A session that another rank's failure cut short may be of a healthy worker.
        elif self._own:
            limit = self.round.job.deadlines[self.stage]
            self._conclude(Outcome.HUNG, "deadline", f"{where} within {limit:g} s")
        else:
            why = f"ended in stage {self.stage} because another rank failed first"
            self._conclude(Outcome.INCONCLUSIVE, "ended_early", why)

    def _conclude(self, outcome: Outcome, reason: str, detail: str) -> None:
        if not self._over:
            self._over = True
            self.outcome, self.reason, self.detail = outcome, reason, detail


def _line(text: str) -> str:
    return "".join(
        character if character.isprintable() else " "
        for character in text[: worker_file.MAX_DETAIL]
    ).strip()


def _description(job: WorkerJob, rank_spec: RankSpec) -> dict[str, Any]:
    return {
        "backend": job.backend,
        "prefix": f"{rank_spec.group}/",
        "rank": rank_spec.rank if rank_spec.group_rank is None else rank_spec.group_rank,
        "size": job.world_size if rank_spec.group_size is None else rank_spec.group_size,
        "device": rank_spec.device,
        "adapter": rank_spec.adapter,
        "address": job.address,
        "interface": job.interface,
        "steps": job.steps,
        "warm_up": job.warm_up,
        "device_steps": asdict(job.device_steps) if job.device_steps is not None else None,
        "timeout": max(
            seconds for stage, seconds in job.deadlines.items() if stage is not Stage.IMPORT
        )
        + STORE_MARGIN,
    }
