"""Keeps one worker process running.

Asks it, bounds every answer in time, replaces it, and remembers which part hung.

A part (a GPU, a path) at which a worker hung or crashed goes under quarantine: the next worker
leaves it out, so that the others are read. It is tried again after a back-off, or as soon as its
unkillable worker ends. A worker that fails without having named a part takes all its collectors
down until its own back-off is over.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core import child, wire
from dshealthd.core.child import Child, StartError
from dshealthd.core.collector import Fault, Metric, Reason, counter, gauge
from dshealthd.core.result import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dshealthd.core.collector import Sample
    from dshealthd.core.result import Result

log = logging.getLogger(__name__)

UP = gauge(
    "dshealthd_worker_up",
    "1 if the worker process runs, 0 if it does not (failed, or not needed on this machine).",
    "worker",
)
STARTS = counter("dshealthd_worker_starts_total", "Worker processes started.", "worker")
REPLACED = counter(
    "dshealthd_worker_failures_total",
    "Worker processes given up, by what went wrong.",
    "worker",
    "reason",
)
STUCK = gauge(
    "dshealthd_worker_stuck",
    "Worker processes that hang in the kernel and cannot be killed.",
    "worker",
)
QUARANTINED = gauge(
    "dshealthd_worker_quarantined",
    "Parts (GPUs, paths) that are left out because a worker hung or crashed at them.",
    "worker",
)
METRICS = (UP, STARTS, REPLACED, STUCK, QUARANTINED)

COMMAND = child.python("dshealthd.collection.worker")
START_DEADLINE = 20.0
"""Seconds for an interpreter to start and import; a cold disk under load is slow."""
GRACE = 0.02
"""Seconds in which an answer that has arrived is taken off the socket."""
KILL_DEADLINE = 0.5
"""Seconds after SIGKILL until a process counts as unkillable."""


@dataclass(frozen=True)
class Backoff:
    """Waiting times between tries, doubled up to a limit; in seconds."""

    first: float = 1.0
    limit: float = 60.0

    def after(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row."""
        return min(self.limit, self.first * 2.0 ** min(failures - 1, 16))


class _Broken(Exception):
    """The worker must go. `part` is where it was, if it said so."""

    def __init__(self, reason: Reason, detail: str, part: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail, self.part = reason, detail, part


@dataclass
class _Process:
    """One running worker, its channel and the event of its end."""

    child: Child
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    progress: wire.Progress
    decoder: wire.Decoder


@dataclass
class _Quarantine:
    """Why a part is left out, until when, and the process that is still stuck at it."""

    fault: Fault
    failures: int
    until: float
    stuck: _Process | None = None
    tried: float = 0.0
    """Monotonic time of the last sweep that was to try it again."""


class Supervisor:
    """One worker process and its successors."""

    def __init__(
        self,
        name: str,
        hello: Mapping[str, Any],
        deadlines: Mapping[str, float],
        metrics: Mapping[str, Mapping[str, Metric]],
        monotonic: Callable[[], float],
        backoff: Backoff | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Prepare; nothing starts before the first `collect`.

        `hello` is the worker's first frame, `deadlines` seconds by collector, `metrics` what each
        collector declares, `command` the program, which is given the numbers of its two descriptors
        as last arguments.
        """
        self.name = name
        self.hello = hello
        self._deadlines = deadlines
        self._metrics = metrics
        self._monotonic = monotonic
        self._backoff = backoff or Backoff()
        self._command = command
        self._process: _Process | None = None
        self._stuck: list[_Process] = []
        self._quarantine: dict[str, _Quarantine] = {}
        self._memory: dict[str, Any] = {}
        self._retried = ""
        """The one part under quarantine that this sweep tries again, if any."""
        self._trouble: _Quarantine | None = None
        self._starts = 0
        self._failures: Counter[Reason] = Counter()

    async def collect(self, names: Sequence[str], publish: Callable[[str, Result], None]) -> None:
        """Have the worker run collectors and publish each result as it comes.

        Every name gets one, whatever happens.
        """
        pending = list(names)
        self._retried = self._due()
        while pending:
            try:
                self._check_usable()
                process = self._process or await self._start()
                await self._exchange(process, pending, publish)
            except _Broken as broken:
                if broken.part and broken.part not in self._blocked():
                    await self._give_up(broken)
                    continue
                if self._process is not None:
                    await self._give_up(broken)
                for name in pending:
                    publish(name, failed(broken.reason, broken.detail))
                return

    async def close(self) -> None:
        """End the worker: by closing its channel, after a second by SIGKILL.

        One that cannot be killed is left behind.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.writer.close()
        if not await process.child.ends(1.0):
            await self._kill(process)

    def samples(self) -> Iterator[Sample]:
        """Yield the supervisor's own metrics."""
        yield UP(float(self._process is not None), self.name)
        yield STARTS(float(self._starts), self.name)
        for reason, count in self._failures.items():
            yield REPLACED(float(count), self.name, reason)
        yield STUCK(float(len(self._stuck)), self.name)
        yield QUARANTINED(float(len(self._blocked())), self.name)

    def _check_usable(self) -> None:
        """Raise while the worker as a whole waits for its back-off, or for its stuck predecessor to
        end.
        """
        trouble = self._trouble
        if trouble is not None and (trouble.stuck or self._monotonic() < trouble.until):
            raise _Broken(trouble.fault.reason, trouble.fault.detail)

    def _due(self) -> str:
        """Return the part to be tried again, whose turn was longest ago; "" if none is due.

        One alone in a sweep: where several hang, each costs its deadline, and meanwhile the parts
        that are well would not be read.
        """
        now = self._monotonic()
        due = [
            (entry.tried, part)
            for part, entry in self._quarantine.items()
            if not entry.stuck and now >= entry.until
        ]
        if not due:
            return ""
        part = min(due)[1]
        self._quarantine[part].tried = now
        return part

    def _blocked(self) -> dict[str, Fault]:
        """Return the parts that the worker must leave out now."""
        now = self._monotonic()
        return {
            part: entry.fault
            for part, entry in self._quarantine.items()
            if entry.stuck or now < entry.until or part != self._retried
        }

    async def _start(self) -> _Process:
        """Start a worker and wait until it is ready."""
        what = f"worker {self.name}"
        try:
            with child.channel(what) as (ours, theirs):
                page = _page(what)
                try:
                    progress = wire.Progress(page)
                    started = child.spawn(
                        what,
                        [*self._command, str(page), str(theirs.fileno())],
                        descriptors=[page, theirs.fileno()],
                    )
                finally:
                    os.close(page)
                self._starts += 1
                reader, writer = await child.streams(ours)
        except StartError as error:
            raise self._not_started(error) from error
        process = self._process = _Process(
            started, reader, writer, progress, wire.Decoder(self._metrics)
        )
        started.when_ended(lambda: self._ended(process))
        writer.write(wire.pack({**self.hello, "memory": self._memory}))
        try:
            async with asyncio.timeout(START_DEADLINE):
                await self._frame(process)
        except TimeoutError as error:
            raise _Broken(
                Reason.TIMEOUT, f"worker {self.name} was not ready within {START_DEADLINE:g} s"
            ) from error
        return process

    def _not_started(self, error: StartError) -> _Broken:
        """Note that no worker can be started, and return that for its collectors.

        It is tried again after the back-off, from the collection that follows it.
        """
        failures = self._trouble.failures + 1 if self._trouble else 1
        fault = Fault("", Reason.CANNOT_START, str(error))
        self._trouble = _Quarantine(
            fault, failures, self._monotonic() + self._backoff.after(failures)
        )
        self._failures[Reason.CANNOT_START] += 1
        log.warning("%s (failure %d)", error, failures)
        return _Broken(fault.reason, fault.detail)

    def _ended(self, process: _Process) -> None:
        """Let go of a process that has ended, and lift the quarantine that it was stuck in."""
        process.writer.close()
        if process in self._stuck:
            self._stuck.remove(process)
            log.warning("worker %s: stuck process %d has ended", self.name, process.child.pid)
        entries = [*self._quarantine.values(), *([self._trouble] if self._trouble else [])]
        for entry in entries:
            if entry.stuck is process:
                entry.stuck, entry.until = None, self._monotonic()

    async def _exchange(
        self, process: _Process, pending: list[str], publish: Callable[[str, Result], None]
    ) -> None:
        """Send one request and take its answers.

        Names are removed from `pending` as their results arrive.
        """
        blocked = self._blocked()
        retried = [part for part in self._quarantine if part not in blocked]
        process.writer.write(
            wire.pack({"collect": pending, "blocked": list(blocked.values()), "retried": retried})
        )
        asked = self._monotonic()
        replace = None
        while True:
            message = await self._answer(process, asked)
            try:
                if "done" in message:
                    for part in message["done"]:
                        self._quarantine.pop(part, None)
                    self._memory = dict(message.get("memory", self._memory))
                    break
                name = message["result"]
                result = process.decoder.unpack(message)
                pending.remove(name)
            except wire.type_error as error:
                raise _Broken(
                    Reason.MALFORMED,
                    f"worker {self.name} sent an invalid message: {error!r}",
                ) from error
            publish(name, result)
            if result.replace_worker:
                replace = _Broken(result.reason or Reason.INTERNAL, result.detail)
        if replace is not None:
            raise replace
        self._trouble = None

    async def _answer(self, process: _Process, asked: float) -> dict[str, Any]:
        """Return the next frame of an exchange.

        Raises `_Broken` when the worker stays at one part beyond its collector's deadline.
        """
        frame = asyncio.ensure_future(self._frame(process))
        try:
            while True:
                since, collector, part = process.progress.read()
                deadline = self._deadlines.get(collector) or max(self._deadlines.values())
                left = max(since, asked) + deadline - self._monotonic()
                # Even when time is up, an answer that is already there counts: it may be the agent
                # that was stopped.
                await asyncio.wait({frame}, timeout=max(left, GRACE))
                if frame.done():
                    return frame.result()
                if left <= 0 and process.progress.read() == (since, collector, part):
                    where = f" at {part}" if part else ""
                    raise _Broken(Reason.TIMEOUT, f"no answer within {deadline:g} s{where}", part)
        finally:
            frame.cancel()

    async def _frame(self, process: _Process) -> dict[str, Any]:
        """Return the next frame; raises `_Broken` when the worker ends, or sends what is no frame."""
        try:
            (size,) = wire.LENGTH.unpack(await process.reader.readexactly(wire.LENGTH.size))
            if size > wire.MAX_FRAME:
                raise _Broken(Reason.MALFORMED, f"worker {self.name} sent a frame of {size} bytes")
            message = json.loads(await process.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            part = process.progress.read()[2]
            where = f" at {part}" if part else ""
            raise _Broken(
                Reason.CRASHED, f"worker {self.name} {await self._epitaph(process)}{where}", part
            ) from error
        except ValueError as error:
            raise _Broken(Reason.MALFORMED, f"worker {self.name} sent no JSON: {error}") from error
        if not isinstance(message, dict):
            raise _Broken(Reason.MALFORMED, f"worker {self.name} sent no JSON object")
        return message

    async def _epitaph(self, process: _Process) -> str:
        """Say how a process ended."""
        await self._kill(process)
        code = process.child.code
        return "closed its channel" if code is None else child.how_ended(code)

    async def _give_up(self, broken: _Broken) -> None:
        """Kill the worker, and put what it hung at, or the worker itself, under quarantine."""
        process, self._process = self._process, None
        if process is None:
            return
        reason, detail = broken.reason, broken.detail
        if not await self._kill(process):
            reason, detail = Reason.STUCK, f"{detail}; process {process.child.pid} cannot be killed"
            self._stuck.append(process)
        self._failures[reason] += 1
        before = self._quarantine.get(broken.part) if broken.part else self._trouble
        failures = before.failures + 1 if before else 1
        until = self._monotonic() + self._backoff.after(failures)
        entry = _Quarantine(
            Fault(broken.part, reason, detail),
            failures,
            until,
            process if reason is Reason.STUCK else None,
            self._monotonic(),
        )
        if broken.part:
            self._quarantine[broken.part] = entry
            self._retried = ""  # once in a sweep, even where the back-off is over already
        else:
            self._trouble = entry
            broken.reason, broken.detail = reason, detail
        log.warning("worker %s replaced: %s (%s, failure %d)", self.name, detail, reason, failures)

    async def _kill(self, process: _Process) -> bool:
        """Kill the process; False if it is still there after the deadline."""
        return await process.child.killed(KILL_DEADLINE)


def _page(what: str) -> int:
    """Return a descriptor of a page of progress; StartError."""
    try:
        return wire.Progress.create()
    except OSError as error:
        raise StartError(what, error) from error
