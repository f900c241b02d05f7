"""The session of one worker, as the agent follows it: its stages, deadlines and result.

Its job goes out, its stages, timings and store operations come in, each stage with its deadline.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dshealthd.core import wire
from dshealthd.core.deadline import time_limit
from dshealthd.linux.starvation import STARVED
from dshealthd.probe.observation import Outcome, Stage, Timing
from dshealthd.probe.workers import worker as worker_file
from dshealthd.probe.workers.job import Checksum, RankResult, RankSpec, WorkerJob
from dshealthd.probe.workers.store import StoreError, StoreHandler

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from dshealthd.probe.workers.fork_server import ForkedWorker

GRACE = 1.0
"""Seconds that the other ranks of this node get to say what they know once one has failed.

Most see their connections close.
"""
LAST_MOMENT = 2.0
"""Seconds that a worker which has closed its channel gets to end, so that its own exit status is
known.
"""
STORE_MARGIN = 2.0
"""Seconds that store and backend wait longer than the longest stage may last, so that the stage's
deadline is what ends a worker.
"""
MAX_FRAME = 1 << 20
MAX_STORE_SECONDS = 600.0
MAX_DETAIL = 1000
MAX_LIBRARY = 200
"""Characters of what a checksum depends on: a label."""
STARVABLE = frozenset({"connection_lost", "deadline", "store", "timeout", "unkillable"})
"""Reasons that a worker without a CPU gives, or is given, too."""
_OUTCOMES = {"refused": Outcome.REFUSED, "no_route": Outcome.UNREACHABLE}
"""Errors that are outcomes of their own."""


class NodeWorkers:
    """The workers of one call of `run`."""

    def __init__(
        self, job: WorkerJob, store: StoreHandler, progress: Callable[[int, Stage], None]
    ) -> None:
        """Nothing has started."""
        self.job, self.store, self.progress = job, store, progress
        self.attended: list[WorkerSession] = []
        self._ends: float | None = None

    def hurry(self) -> None:
        """Give all sessions of this node's ranks a last moment, as one has failed."""
        if self._ends is None:
            self._ends = asyncio.get_running_loop().time() + GRACE
            for one in self.attended:
                one.hurry()

    @property
    def hurried(self) -> bool:
        """Whether one of this node's ranks has failed in its session."""
        return self._ends is not None

    def end(self, seconds: float) -> tuple[float, bool]:
        """Return the loop time at which a session's stage of so many seconds that begins now ends,
        and whether that is its own deadline.
        """
        end = asyncio.get_running_loop().time() + seconds
        return (end, True) if self._ends is None or end <= self._ends else (self._ends, False)


class WorkerSession:
    """One worker as the agent follows it through its stages."""

    def __init__(self, rank_spec: RankSpec, worker: ForkedWorker, round_: NodeWorkers) -> None:
        """It has been forked and knows nothing yet."""
        self.rank_spec, self.worker, self.round = rank_spec, worker, round_
        self.stage = Stage.IMPORT
        self.outcome, self.reason, self.detail = Outcome.FAILED, "", ""
        self.timings: list[Timing] = []
        self.checksum: Checksum | None = None
        self._over = False
        self._timeout: asyncio.Timeout | None = None
        self._own = True

    def hurry(self) -> None:
        """End the session before the stage's deadline, if that is after the round's end."""
        if self._timeout is not None and not self._timeout.expired():
            remaining = (self._timeout.when() or 0.0) - asyncio.get_running_loop().time()
            end, self._own = self.round.end(max(0.0, remaining))
            self._timeout.reschedule(end)

    def starve(self) -> None:
        """Take back of the session's result what this node's own lack of CPU may have done."""
        if self.reason in STARVABLE:
            self.outcome, self.detail = (
                Outcome.INCONCLUSIVE,
                f"this node is too busy to tell: {self.reason}, {self.detail}",
            )
            self.reason = STARVED

    def result(self, entered: int, left: int, versions: str) -> RankResult:
        """Return what became of the worker's session."""
        return RankResult(
            rank=self.rank_spec.rank,
            outcome=self.outcome,
            stage=Stage.DONE if self.outcome is Outcome.OK else self.stage,
            reason=self.reason,
            detail=self.detail,
            timings=tuple(self.timings),
            entered=entered,
            left=left,
            versions=versions,
            part=self.rank_spec.part,
            checksum=self.checksum,
        )

    async def follow(self, channel: socket.socket) -> None:
        """Give the worker its job and take what it says, until it ends or its time is over."""
        reader, writer = await asyncio.open_connection(sock=channel, limit=MAX_FRAME)
        requests: set[asyncio.Task[None]] = set()
        try:
            writer.write(wire.pack(_description(self.round.job, self.rank_spec)))
            while True:
                seconds = (
                    worker_file.LINGER + 1.0 if self._over else self.round.job.deadlines[self.stage]
                )
                end, self._own = self.round.end(seconds)
                stage = asyncio.create_task(self._take_stage(reader, writer, requests))
                try:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(end) as self._timeout:
                            # Waited for but not awaited: at the deadline, frames that have already
                            # arrived are still taken, in case it was the agent that was stopped.
                            await asyncio.wait({stage})
                    self._timeout = None
                    async with time_limit(0.0):
                        await stage
                finally:
                    self._timeout = None
                    stage.cancel()
                    await asyncio.gather(stage, return_exceptions=True)
        except TimeoutError:
            if not self._over:
                self._judge_silence()
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self._over:
                self.reason = "exited"
                await self.worker.gone(LAST_MOMENT)
        except (*wire.type_error, struct.error) as error:
            self._conclude(
                Outcome.FAILED,
                "malformed",
                f"the worker sent an invalid message: {error!r}",
            )
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            # Without flushing: the worker has ended, or is killed next.
            writer.transport.abort()

    async def _take_stage(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        requests: set[asyncio.Task[None]],
    ) -> None:
        """Take the worker's frames until another deadline of its session holds."""
        while await self._take(reader, writer, requests):
            pass

    async def _take(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        requests: set[asyncio.Task[None]],
    ) -> bool:
        """Take one frame of the worker; False when a stage begins or the last word was said.

        Another deadline then holds.
        """
        (size,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
        if size > MAX_FRAME:
            detail = f"a frame of {size} bytes"
            raise ValueError(detail)
        message = json.loads(await reader.readexactly(size))
        if "store" in message:
            request = asyncio.create_task(self._serve(message, writer))
            requests.add(request)
            request.add_done_callback(requests.discard)
            return True
        if "timing" in message:
            op, size, seconds, bandwidth = message["timing"]
            self.timings.append(
                Timing(str(op), int(size), float(seconds), float(bandwidth), self.rank_spec.part)
            )
            return True
        if "checksum" in message:
            library, number = message["checksum"]
            self.checksum = Checksum(_line(str(library))[:MAX_LIBRARY], int(number))
            return True
        if "end" not in message:
            self.stage = Stage(message["stage"])
            self.round.progress(self.rank_spec.rank, self.stage)
            return False
        reason, outcome, self.stage = (
            str(message["reason"]),
            Outcome(message["end"]),
            Stage(message["stage"]),
        )
        self._conclude(_OUTCOMES.get(reason, outcome), reason, _line(str(message["detail"])))
        return False

    async def _serve(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Carry out one operation of the store for the session's worker and answer it."""
        number, value = message["id"], message["value"]
        answer: dict[str, Any]
        try:
            raw = base64.b64decode(value) if isinstance(value, str) else value
            done = await self.round.store(
                str(message["store"]),
                str(message["key"]),
                raw,
                min(MAX_STORE_SECONDS, float(message["timeout"])),
            )
            answer = {"value": base64.b64encode(done).decode() if isinstance(done, bytes) else done}
        except TimeoutError:
            answer = {"error": "timeout"}
        except (StoreError, OSError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if not writer.transport.is_closing():
            writer.write(wire.pack({"id": number, **answer}))

    def _judge_silence(self) -> None:
        """Say why a worker's session is over.

        Its own state tells who is stuck from who waits for him.
        """
        state = self.worker.state()
        where = f"no progress in stage {self.stage}"
        if state in {"T", "t"}:
            self._conclude(
                Outcome.HUNG,
                "stopped",
                f"{where}: process {self.worker.pid} is stopped by a signal",
            )
        elif state == "D":
            self._conclude(
                Outcome.HUNG,
                "uninterruptible",
                f"{where}: process {self.worker.pid} hangs in the kernel",
            )
        # Ended early because another rank has failed, it may have been well.
        elif self._own:
            self._conclude(
                Outcome.HUNG,
                "deadline",
                f"{where} within {self.round.job.deadlines[self.stage]:g} s",
            )
        else:
            self._conclude(
                Outcome.INCONCLUSIVE,
                "ended_early",
                f"ended in stage {self.stage}, as another rank had failed",
            )

    def _conclude(self, outcome: Outcome, reason: str, detail: str) -> None:
        if not self._over:
            self._over = True
            self.outcome, self.reason, self.detail = outcome, reason, detail


def _line(text: str) -> str:
    """Return a worker's words in its session as one bounded line."""
    return "".join(
        character if character.isprintable() else " " for character in text[:MAX_DETAIL]
    ).strip()


def _description(job: WorkerJob, rank_spec: RankSpec) -> dict[str, Any]:
    """Return a seat's job as the worker of the session takes it."""
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
