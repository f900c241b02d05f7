"""The supervisor: keeps one worker process running, and hung parts in quarantine.

It sends requests, sets a deadline for every answer, replaces the worker, and remembers which part
hung.

A part (a GPU, a path) at which a worker hung or crashed goes into quarantine: the next worker skips
it, so that the others are read. It is retried after a back-off, or as soon as its unkillable worker
ends. If a worker fails without naming a part, all its collectors fail until its own back-off is
over.

Several collectors may read one part. Those without which the part can be read enter it under a name
of their own (`read_by`), so that a call of theirs that hangs leaves out their readings alone. A
second such failure in a sweep that ends the worker leaves out the collector until the next sweep.

A worker killed from outside (by the OOM killer, by an operator) says nothing about the part it was
at. The first time, a new worker reads that part again in the same sweep. A second time, before the
part has answered, counts as a crash at the part, as reading it may be what uses the memory.

Several parts may hang at once, and it takes a whole deadline to be certain of each. The others do
not wait for that: a worker that has been silent at a part for `PATIENCE` is left there until the
deadline, another one reads the rest, and *scouts*, separate processes, find out in parallel which
of the rest hang too. A scout also retries a part in quarantine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dshealthd.collection import worker_process
from dshealthd.collection.worker_process import Broken, Silent, WorkerProcess
from dshealthd.core import child
from dshealthd.core.child import StartError
from dshealthd.core.collector import (
    Fault,
    Metric,
    News,
    Reason,
    Sample,
    counter,
    gauge,
    shared_part,
)
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed
from dshealthd.core.timing import Backoff

log = logging.getLogger(__name__)

UP = gauge(
    "dshealthd_worker_up",
    "1 if the worker process runs, 0 if it does not (failed, or not needed on this machine).",
    "worker",
)
STARTS = counter("dshealthd_worker_starts_total", "Worker processes started.", "worker")
REPLACED = counter(
    "dshealthd_worker_failures_total",
    "Worker processes abandoned, by reason.",
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
    "Parts (GPUs, paths) that are skipped because they hung or crashed a worker.",
    "worker",
)

COMMAND = child.python("dshealthd.collection.worker")
PATIENCE = 3.0
"""Seconds that the other parts wait for a silent one.

With an interval of 5 s and the start of two processes this keeps them fresher than 20 s. A GPU
without persistence mode takes some seconds to wake: a worker waits for it on the side, and it gets
more time from then on.
"""
SCOUTS = 8
"""Most scouts of one worker at a time: one per GPU of a node, about 30 MiB each, for seconds."""
MOST_STUCK = 3 * SCOUTS
"""Most processes of one worker that hang unkillably before no more are started: one at each of 16
GPUs, and of one user's (`worker.MOST_OF_USER`). They hold some 30 MiB each, a third of the unit's
MemoryMax.
"""
SLOW_FOR = 600.0
"""Seconds for which a part that answered late, but in time, gets its whole deadline."""
KILLED_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})
"""Return codes of a worker killed from outside: no crash raises these signals."""


@dataclass
class _Quarantine:
    """Why a part is skipped, until when, and the process that is still stuck at it."""

    fault: Fault
    failures: int
    until: float
    stuck: WorkerProcess | None = None
    tried: float = 0.0
    """Monotonic time of the last sweep that retried it."""
    collector: str = ""
    """The collector that hung at it."""


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
        parallel: Collection[str] = (),
        patience: float = PATIENCE,
        tell: Callable[[News], None] = lambda _news: None,
    ) -> None:
        """Prepare; nothing starts before the first `collect`.

        `hello` is the worker's first frame, `deadlines` seconds by collector, `metrics` the
        declared metrics by collector. `command` is the program, which gets its two descriptors as
        last arguments. `parallel` are the collectors whose parts several processes may read at
        once, `patience` the seconds for which the others wait for a silent one of those parts.
        `tell` receives the news of the worker's collectors.
        """
        self.name = name
        self._tell = tell
        self.on_hang: Callable[[str], object] = lambda _collector: None
        """Called with the collector whose part went into quarantine, so that it shows at once."""
        self.hello = hello
        self._deadlines = deadlines
        self._metrics = metrics
        self._monotonic = monotonic
        self._backoff = backoff or Backoff()
        self._command = command
        self._parallel = frozenset(parallel)
        self._others_wait = patience
        self._process: WorkerProcess | None = None
        self._stuck: list[WorkerProcess] = []
        self._quarantine: dict[str, _Quarantine] = {}
        self._aside: set[str] = set()
        """Parts that a process other than the worker is at."""
        self._apart: set[asyncio.Task[None]] = set()
        """Tasks that wait for those processes."""
        self._slow: dict[str, float] = {}
        """Parts that answered late but in time, and until when they get their whole deadline."""
        self._memory: dict[str, Any] = {}
        self._retried = ""
        """The one part in quarantine that the worker itself retries in this sweep."""
        self._killed_at: set[str] = set()
        """Parts at which a worker was killed from outside and that have not answered since.

        "" if it was at no part.
        """
        self._trouble: _Quarantine | None = None
        self._starts = 0
        self._failures: Counter[Reason] = Counter()

    async def collect(
        self,
        names: Sequence[str],
        publish: Callable[[str, CollectionResult], None],
        heard: Collection[tuple[News, str]] = (),
    ) -> None:
        """Have the worker run collectors, and publish each result as it arrives.

        Every name gets a result, whatever happens. `heard` is passed on: see `Context.heard`.
        """
        pending = list(names)
        self._retried = self._due()
        hung = failed_alone = ""
        # Terminates: each turn answers all, excuses or skips one more part, or gives up.
        while pending:
            try:
                self._check_usable()
                process = self._process or await self._start()
                if hung:
                    await self._survey(process, pending, hung)
                    hung = ""
                await self._exchange(process, pending, publish, heard)
            except Broken as broken:
                if broken.process is not None and broken.process is self._process:
                    self._process = None
                if await self._excused(broken):
                    continue
                # A worker stuck at a part that it should have skipped would get stuck there again.
                if broken.part and broken.part not in self._blocked():
                    hung = self._news(broken)
                    if isinstance(broken, Silent):
                        self._set_aside(broken.part, self._outlast(process, broken))
                        continue
                    await self._give_up(broken)
                    if shared_part(broken.part):
                        # The others would wait for a new worker at each part.
                        if failed_alone == broken.collector and failed_alone in pending:
                            pending.remove(failed_alone)
                            publish(failed_alone, failed(broken.reason, broken.detail))
                            hung = ""  # the others have no such part, and need no survey
                        failed_alone = broken.collector
                    continue
                await self._give_up(broken)
                for name in pending:
                    publish(name, failed(broken.reason, broken.detail))
                return

    async def close(self) -> None:
        """End worker and scouts by closing their channels, and after a second by SIGKILL.

        A process that cannot be killed is left behind.
        """
        process, self._process = self._process, None
        apart = list(self._apart)
        for task in apart:
            task.cancel()
        # Cancel the scouts first, so that they are killed during the worker's second.
        if process is not None:
            await process.retired()
        await asyncio.gather(*apart, return_exceptions=True)

    def samples(self) -> Iterator[Sample]:
        """Yield the supervisor's own metrics."""
        yield UP(float(self._process is not None), self.name)
        yield STARTS(float(self._starts), self.name)
        for reason, count in self._failures.items():
            yield REPLACED(float(count), self.name, reason)
        yield STUCK(float(len(self._stuck)), self.name)
        yield QUARANTINED(float(len(self._left_out())), self.name)

    def _check_usable(self) -> None:
        """Raise Broken while the worker is in back-off, or its predecessor is stuck."""
        trouble = self._trouble
        if trouble is not None and (trouble.stuck or self._monotonic() < trouble.until):
            raise Broken(trouble.fault.reason, trouble.fault.detail)

    def _due(self) -> str:
        """Return the part that the worker should retry, the least recently tried; "" if none.

        There is at most one per sweep. If its deadline is longer than the others can wait, a scout
        retries it instead.
        """
        now = self._monotonic()
        due = [
            (entry.tried, part)
            for part, entry in self._quarantine.items()
            if not entry.stuck and now >= entry.until and part not in self._aside
        ]
        if not due:
            return ""
        part = min(due)[1]
        entry = self._quarantine[part]
        entry.tried = now
        if not self._takes_long(entry.collector):
            return part
        if len(self._aside) < SCOUTS:
            self._send_scout(part, entry.collector)
        return ""

    def _takes_long(self, collector: str) -> bool:
        return collector in self._parallel and self._deadlines[collector] > self._others_wait

    def _left_out(self) -> dict[str, Fault]:
        now = self._monotonic()
        return {
            part: entry.fault
            for part, entry in self._quarantine.items()
            if entry.stuck or now < entry.until or part != self._retried
        }

    def _blocked(self) -> dict[str, Fault]:
        """Return all parts that the worker must skip: in quarantine, or with another process."""
        waiting = {
            part: Fault(part, Reason.WAITING, "no answer yet; its deadline has not passed")
            for part in self._aside
        }
        return waiting | self._left_out()

    async def _start(self) -> WorkerProcess:
        """Return a new worker, or raise `Broken`; after a back-off the next one is started."""
        try:
            process = self._process = await self._opened()
        except StartError as error:
            failures = self._trouble.failures + 1 if self._trouble else 1
            fault = Fault("", Reason.CANNOT_START, str(error))
            self._trouble = _Quarantine(
                fault, failures, self._monotonic() + self._backoff.after(failures)
            )
            self._failures[Reason.CANNOT_START] += 1
            log.warning("%s (failure %d)", error, failures)
            raise Broken(fault.reason, fault.detail) from error
        return process

    async def _opened(self) -> WorkerProcess:
        """Return a new worker process that is ready, or raise `Broken` or StartError."""
        if len(self._stuck) >= MOST_STUCK:
            raise Broken(
                Reason.STUCK,
                f"{len(self._stuck)} processes of worker {self.name} hang in the kernel and cannot "
                "be killed; no more are started until one has ended",
            )
        started = await worker_process.start(self.name, self._command)
        self._starts += 1
        process = WorkerProcess(self.name, started, self._deadlines, self._metrics, self._monotonic)
        process.child.when_ended(lambda: self._ended(process))
        try:
            await process.greet({**self.hello, "memory": self._memory})
        # Only this method knows of the process yet, so it must end it.
        except asyncio.CancelledError:
            await process.child.killed()
            raise
        return process

    def _ended(self, process: WorkerProcess) -> None:
        """Release a process that has ended, and lift the quarantine of the part it was stuck at."""
        process.let_go()
        if process in self._stuck:
            self._stuck.remove(process)
            log.warning("worker %s: stuck process %d has ended", self.name, process.child.pid)
        entries = [*self._quarantine.values(), *([self._trouble] if self._trouble else [])]
        for entry in entries:
            if entry.stuck is process:
                entry.stuck, entry.until = None, self._monotonic()

    async def _exchange(
        self,
        process: WorkerProcess,
        pending: list[str],
        publish: Callable[[str, CollectionResult], None],
        heard: Collection[tuple[News, str]],
    ) -> None:
        """Send the worker one request and process its answers.

        Names are removed from `pending` as their results arrive.
        """
        replace, whole = None, set[str]()

        def record(name: str, result: CollectionResult) -> None:
            nonlocal replace
            pending.remove(name)
            publish(name, result)
            if result.outcome is CollectionOutcome.OK:
                whole.add(name)
            if result.replace_worker:
                replace = Broken(result.reason or Reason.INTERNAL, result.detail, process)

        done = await process.collect(
            list(pending),
            self._blocked(),
            self._patience,
            record,
            retried=self._retried,
            heard=heard,
        )
        retried = self._quarantine.get(self._retried)
        # It answered; or it is gone, as its collector has read everything else.
        if retried and (self._retried in done["touched"] or retried.collector in whole):
            del self._quarantine[self._retried]
        self._killed_at.difference_update(done["touched"], [""])
        self._memory = dict(done.get("memory", self._memory))
        for news in done["news"]:
            self._tell(news)
        # Only after the closing frame: by then the sweep's other collectors have been read.
        if replace is not None:
            raise replace
        self._trouble = None

    def _patience(self, collector: str, part: str) -> float:
        """Return the seconds for which the worker itself may stay at a part."""
        slow = self._monotonic() < self._slow.get(part, 0.0)
        # Each part aside holds a process. On a node where everything hangs, waiting is better than
        # filling the memory.
        full = len(self._aside) >= 2 * SCOUTS
        aside = self._takes_long(collector) and not slow and not full
        return self._others_wait if aside else math.inf

    def _news(self, broken: Broken) -> str:
        """Return the part that has newly hung, if the others may hang too; else ""."""
        known = broken.part in self._quarantine or broken.reason is not Reason.TIMEOUT
        return "" if known or broken.collector not in self._parallel else broken.part

    async def _survey(self, process: WorkerProcess, names: Sequence[str], hung: str) -> None:
        """Have scouts try the parts after the one that hung.

        Return when the scouts are done, or the other parts have waited long enough for them.
        """
        blocked = self._blocked()
        # Only the first, which is the one that hung: each has parts of its own besides the shared.
        done = await process.collect(names[:1], blocked, self._patience, _ignore, last=hung)
        untried = [part for part in done["untried"] if part not in blocked]
        if len(untried) < 2:  # noqa: PLR2004 - the worker itself is as fast
            return
        free = max(SCOUTS - len(self._aside), 0)
        if sent := [self._send_scout(part, names[0]) for part in untried[:free]]:
            # Interpreters start slowly on a loaded node; that does not count as silence of a part.
            await asyncio.wait([ready for ready, _ in sent])
            patience = self._others_wait if self._takes_long(names[0]) else None
            await asyncio.wait([back for _, back in sent], timeout=patience)

    def _send_scout(
        self, part: str, collector: str
    ) -> tuple[asyncio.Task[WorkerProcess], asyncio.Task[None]]:
        """Have a scout process try a part; return the tasks of its start and of its work."""
        ready = asyncio.create_task(self._opened(), name=f"worker {self.name}, scout at {part}")
        return ready, self._set_aside(part, self._scout(part, collector, ready))

    def _set_aside(
        self, part: str, work: Coroutine[Any, Any, WorkerProcess | None]
    ) -> asyncio.Task[None]:
        """Run `work` on a part in the background; then end the process that it returns, if any."""

        async def aside() -> None:
            try:
                used = await work
            finally:
                self._aside.discard(part)
            if used is not None:
                await used.retired()

        self._aside.add(part)
        task = asyncio.create_task(aside(), name=f"worker {self.name}, aside, at {part}")
        self._apart.add(task)
        task.add_done_callback(self._apart.discard)
        return task

    async def _scout(
        self, part: str, collector: str, ready: asyncio.Task[WorkerProcess]
    ) -> WorkerProcess | None:
        """Find out in a separate process whether a part answers.

        Lift its quarantine, or impose it.
        """
        blocked = {name: fault for name, fault in self._blocked().items() if name != part}
        process = None
        try:
            process = await ready
            asked = self._monotonic()
            done = await process.collect(
                [collector], blocked, lambda *_: math.inf, _ignore, last=part
            )
        except asyncio.CancelledError:
            if process is not None:
                await process.child.killed()
            raise
        except StartError as error:
            log.warning("%s; %s will be tried later", error, part)
            self._failures[Reason.CANNOT_START] += 1
            self._postpone(part)
            return None
        except Broken as broken:
            if broken.part != part:  # says nothing about this part; the worker will see
                if broken.process is not None:
                    await self._end(broken.process, broken)
                self._postpone(part)
            elif await self._excused(broken):
                self._postpone(part)
            else:
                await self._give_up(broken)
            return None
        if part in done["touched"]:
            self._answered(part, self._monotonic() - asked)
        else:
            self._postpone(part)
        return process

    async def _outlast(self, process: WorkerProcess, silent: Silent) -> None:
        process.progress.stop()
        process.let_go()
        try:
            ended = await process.child.ends(max(silent.left, 0.0))
        except asyncio.CancelledError:
            await process.child.killed()
            raise
        code = process.child.code
        # It checks for the stop request only once the part has answered, and then exits with 0.
        if ended and not code:
            self._answered(silent.part, self._others_wait)
            return
        if ended and code is not None:
            detail = f"worker {self.name} {child.how_ended(code)} at {silent.part}"
            silent.reason, silent.detail = Reason.CRASHED, detail
        if not await self._excused(silent):
            await self._give_up(silent)

    def _answered(self, part: str, took: float) -> None:
        """Record that a part answered a scout, or a worker left at it, after `took` seconds."""
        self._quarantine.pop(part, None)
        if took >= self._others_wait:
            self._slow[part] = self._monotonic() + SLOW_FOR

    def _postpone(self, part: str) -> None:
        if (entry := self._quarantine.get(part)) is not None:
            entry.until = self._monotonic() + self._backoff.after(entry.failures)

    async def _end(self, process: WorkerProcess, broken: Broken) -> bool:
        """Kill a process, and count the reason; False if it cannot be killed."""
        killed = await process.child.killed()
        process.let_go()
        if not killed:
            broken.reason = Reason.STUCK
            broken.detail += f"; process {process.child.pid} cannot be killed"
            self._stuck.append(process)
        self._failures[broken.reason] += 1
        return killed

    async def _excused(self, broken: Broken) -> bool:
        """Return whether the worker was killed from outside, for the first time at its part.

        If so, end it without a quarantine.
        """
        process = broken.process
        excused = (
            process is not None
            and broken.reason is Reason.CRASHED
            and process.child.code in KILLED_FROM_OUTSIDE
            and broken.part not in self._killed_at
        )
        if process is not None and excused:
            self._killed_at.add(broken.part)
            await self._end(process, broken)
            log.warning("worker %s replaced: %s; retrying", self.name, broken.detail)
        return excused

    async def _give_up(self, broken: Broken) -> None:
        """Kill the worker, and quarantine the part it was at, or the worker itself."""
        if broken.process is None:
            return
        killed = await self._end(broken.process, broken)
        before = self._quarantine.get(broken.part) if broken.part else self._trouble
        failures = before.failures + 1 if before else 1
        now = self._monotonic()
        entry = _Quarantine(
            Fault(broken.part, broken.reason, broken.detail),
            failures,
            now + self._backoff.after(failures),
            None if killed else broken.process,
            now,
            broken.collector,
        )
        if broken.part:
            self._quarantine[broken.part] = entry
            self._slow.pop(broken.part, None)
            if self._retried == broken.part:
                self._retried = ""  # once per sweep, even if the back-off is already over
            if before is None:
                self.on_hang(broken.collector)
        else:
            self._trouble = entry
        log.warning(
            "worker %s replaced: %s (%s, failure %d)",
            self.name,
            broken.detail,
            broken.reason,
            failures,
        )


def _ignore(_name: str, _result: CollectionResult) -> None:
    """Drop a scout's result: only whether the parts answer matters."""
