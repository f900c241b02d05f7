"""The scheduler: runs every collector at its own interval, in one group per process.

The agent's own group runs here, the others run through their worker's supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.collection.supervisor import Supervisor
from dshealthd.config import registry
from dshealthd.core import background, state_file, state_writer
from dshealthd.core.collector import Collector, CollectorOptions, Context, News, Sample
from dshealthd.core.host import MAX_FILE
from dshealthd.core.options import encode
from dshealthd.core.result import attempt, not_available
from dshealthd.core.timing import Backoff, next_due

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.config.config import Config
    from dshealthd.core.snapshot import Snapshot

log = logging.getLogger(__name__)

SLACK = 0.01
"""Seconds by which a collection may be early.

A timer may fire slightly early, and collectors that are nearly due join those that are due.
"""
RESTING = 5.0
"""Least seconds between two collections of a source that is absent, has nothing, or nothing new to
read: one with an interval below need not wake the agent more often than all others do.
"""
WAKE_SPACING = 5.0
"""Least seconds between two collections of a collector that are caused by news.

So a driver that logs thousands of errors costs no more than an interval of 5 s.
"""
STALE_INTERVALS = 3
"""Intervals without a result after which samples expire."""


@dataclass
class _Member:
    kind: type[Collector]
    options: CollectorOptions
    due: float
    collected: float = -math.inf
    """Time of the last collection."""
    extra: float = math.inf
    """Time of an extra collection because of news."""
    woken: float = -math.inf
    """Time of the last collection because of news, past or planned."""
    heard: set[tuple[News, str]] = field(default_factory=set)
    """News since its last collection, each with its subject."""

    @property
    def next(self) -> float:
        """Time of the next collection."""
        return min(self.due, self.extra)


class _WorkerGroup:
    """Collectors that share a process, and so a schedule.

    Collectors that are due at the same time are collected in one request.
    """

    def __init__(
        self, members: Mapping[str, _Member], snapshot: Snapshot, context: Context
    ) -> None:
        self.members = members
        self._snapshot = snapshot
        self._context = context
        self._alarm = asyncio.Event()
        """Ends the sleep of `run`: set by a plan, and when the next collection is due."""

    async def run(self) -> None:
        """Collect when the group's collectors are due, until cancelled."""
        while True:
            self._alarm.clear()
            await self.once()
            wait = min(member.next for member in self.members.values()) - self._context.monotonic()
            timer = asyncio.get_running_loop().call_later(wait, self._alarm.set)
            try:
                await self._alarm.wait()
            finally:
                timer.cancel()

    def notify(self, news: News, about: str = "") -> None:
        """Wake the collectors that wait for this news; `about` as in `Context.heard`."""
        waiting = [name for name, member in self.members.items() if news in member.kind.wakes_on]
        for name in waiting:
            self.members[name].heard.add((news, about))
        self.wake(waiting)

    def wake(self, names: Iterable[str]) -> None:
        """Collect these at once, or after WAKE_SPACING; their regular schedule is unchanged."""
        now = self._context.monotonic()
        for name in names:
            member = self.members[name]
            # Counted from the last planned time, so that a flood of news plans only one.
            extra = max(now, member.woken + WAKE_SPACING)
            if extra < member.next:
                member.woken = extra
                self.plan(member, extra)

    def plan(self, member: _Member, extra: float) -> None:
        """Collect at this time too, unless a collection is due by then."""
        if extra < member.next:
            member.extra = extra
            self._alarm.set()

    async def once(self) -> None:
        """Collect everything in this group that is due now."""
        now = self._context.monotonic()
        due = [name for name, member in self.members.items() if member.next <= now + SLACK]
        present = []
        heard: set[tuple[News, str]] = set()
        for name in due:
            member = self.members[name]
            member.extra = math.inf
            member.collected = now
            heard |= member.heard
            member.heard.clear()
            # After a pause (a stopped process, a suspended machine) do not catch up.
            if member.due <= now + SLACK:
                latest = self._snapshot.get(name)
                samples = () if latest is None else latest.result.samples
                member.due = next_due(now, member.kind.pace(member.options, samples))
            self._expect(name, member.options.interval)
            if (absence := self._absence(member)) is not None:
                self._rest(name)
                self._snapshot.put(name, not_available(absence))
            else:
                present.append(name)
        if present:
            await self.collect(present, frozenset(heard))
        elif due:
            await self.rest()

    def _rest(self, name: str) -> None:
        """Do not collect before RESTING is over, unless something wakes the member."""
        member = self.members[name]
        interval = max(member.options.interval, RESTING)
        member.due = next_due(self._context.monotonic(), interval)
        self._expect(name, interval)

    def _expect(self, name: str, interval: float) -> None:
        """Have a collector's samples expire if they do not come at this interval.

        No sooner than RESTING: a busy machine delays a fast collector by more than its interval.
        """
        deadline = self.members[name].options.deadline
        self._snapshot.expect(name, max(STALE_INTERVALS * interval, RESTING) + deadline)

    def _absence(self, member: _Member) -> str | None:
        """Return why a collector has no source on this machine.

        None if it has one, or if the agent cannot tell, as without a free descriptor: then the
        collection itself succeeds, or says what is wrong.
        """
        try:
            return member.kind.absent(member.options, self._context.host)
        except OSError as error:
            log.debug(
                "collector %s: cannot determine whether its source exists: %s",
                member.kind.name,
                error,
            )
            return None

    async def collect(self, names: list[str], heard: frozenset[tuple[News, str]]) -> None:
        """Run these collectors of the group; `heard` is the news that woke some of them."""
        raise NotImplementedError

    async def rest(self) -> None:
        """Called when no due collector of the group has a source on this machine."""

    async def close(self) -> None:
        """Release the group's collectors, or their worker process."""


class _Inside(_WorkerGroup):
    def __init__(
        self, members: Mapping[str, _Member], snapshot: Snapshot, context: Context
    ) -> None:
        super().__init__(members, snapshot, context)
        self.collectors = {
            name: member.kind(member.options, context) for name, member in members.items()
        }
        self._watched: dict[str, int] = {}
        """Descriptors that announce what is new, by collector."""

    async def collect(self, names: list[str], heard: frozenset[tuple[News, str]]) -> None:
        self._context.sweep += 1
        self._context.heard = heard
        for number, name in enumerate(names):
            if number:
                await asyncio.sleep(0)  # a scrape may come between two collectors
            self._unwatch(name)  # it may close its descriptor, which others may get
            result = attempt(self.collectors[name], self._context.monotonic)
            self._snapshot.put(name, result)
            self._watch(name)
            if not (result.samples or result.faults or result.reason):
                self._rest(name)

    def _watch(self, name: str) -> None:
        """Let a collector rest until its descriptor is readable, if it has one."""
        descriptor = self.collectors[name].descriptor
        if descriptor is None:
            return
        try:
            asyncio.get_running_loop().add_reader(descriptor, self._readable, name)
        except PermissionError:  # a regular file, which is always readable
            return
        self._watched[name] = descriptor
        self._rest(name)

    def _unwatch(self, name: str) -> None:
        if (descriptor := self._watched.pop(name, None)) is not None:
            asyncio.get_running_loop().remove_reader(descriptor)

    def _readable(self, name: str) -> None:
        self._unwatch(name)
        member = self.members[name]
        due = member.collected + member.options.interval
        self.plan(member, max(due, self._context.monotonic()))

    async def close(self) -> None:
        for name, collector in self.collectors.items():
            self._unwatch(name)
            collector.close()
        for name in await state_writer.wait_until_written(state_writer.DEADLINE):
            log.warning("%s: state not saved: the disk hangs", name)


class _Outside(_WorkerGroup):
    def __init__(
        self,
        members: Mapping[str, _Member],
        snapshot: Snapshot,
        context: Context,
        supervisor: Supervisor,
    ) -> None:
        super().__init__(members, snapshot, context)
        self.supervisor = supervisor
        supervisor.on_hang = lambda collector: self.wake([collector])

    async def collect(self, names: list[str], heard: frozenset[tuple[News, str]]) -> None:
        await self.supervisor.collect(names, self._snapshot.put, heard)

    async def rest(self) -> None:
        if all(self._absence(member) is not None for member in self.members.values()):
            await self.supervisor.close()

    async def close(self) -> None:
        await self.supervisor.close()


class Scheduler:
    """Owns the groups of the enabled collectors."""

    name = "collectors"

    def __init__(
        self,
        snapshot: Snapshot,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        state: Path | None = None,
        backoff: Backoff | None = None,
        services: tuple[object, ...] = (),
    ) -> None:
        """Prepare; `apply` starts.

        `state` is the directory for state that survives restarts; None for a collection that must
        leave no trace. `services` are read by the agent's own collectors.
        """
        self._services = services
        self._state = state
        self._snapshot = snapshot
        self._monotonic = monotonic
        self._wall = wall
        self._backoff = backoff
        self._groups: dict[str | None, tuple[_WorkerGroup, asyncio.Task[None], object]] = {}
        self._ended = asyncio.Event()

    async def apply(self, config: Config) -> None:
        """Run the groups of collectors that a config enables.

        Groups that it does not change keep running, with their counters.
        """
        wanted: dict[str | None, dict[str, CollectorOptions]] = {}
        for name, options in config.collectors.items():
            if options.enabled:
                # A group that is not changed may not collect for an interval yet.
                interval = max(options.interval, RESTING)
                self._snapshot.expect(name, STALE_INTERVALS * interval + options.deadline)
                where = registry.all_collectors()[name].runs_in(options)
                wanted.setdefault(where, {})[name] = options
        specifications = {
            worker: (options, config.path, config.log) for worker, options in wanted.items()
        }
        for worker in [
            worker
            for worker, (_, _, running) in self._groups.items()
            if specifications.get(worker) != running
        ]:
            await self._stop(worker)
        # Only now: while one of these groups ends, the others collect, and expect what they have.
        for name, options in config.collectors.items():
            if not options.enabled:
                self._snapshot.forget(name)
        for worker, specification in specifications.items():
            if worker not in self._groups:
                group = self._group(
                    worker, wanted[worker], config, await self._saved(wanted[worker])
                )
                task = asyncio.create_task(group.run(), name=f"collectors of {worker or 'agent'}")
                task.add_done_callback(lambda _task: self._ended.set())
                self._groups[worker] = (group, task, specification)

    async def once(self, config: Config) -> None:
        """Run every collector once, the groups in parallel, and release them.

        For `dshealthd metrics`.
        """
        await self.apply(config)
        while not self._snapshot.complete():
            self._raise_failures()
            await asyncio.sleep(0.01)
        await self.close()

    def _raise_failures(self) -> None:
        """Raise the exception that ended a group's task.

        Such a task never ends by itself: if one did, that is a defect and must surface.
        """
        for _, task, _ in self._groups.values():
            if task.done():
                task.result()

    async def watch(self) -> None:
        """Wait while all groups run; raise the exception that ended one."""
        while True:
            await self._ended.wait()
            self._ended.clear()
            self._raise_failures()

    async def close(self) -> None:
        """Stop all groups in parallel."""
        await asyncio.gather(*(self._stop(worker) for worker in list(self._groups)))

    def tell(self, news: News, about: str = "") -> None:
        """Pass news on to all groups; `about` as in `Context.heard`."""
        for group, _, _ in self._groups.values():
            group.notify(news, about)

    def collect(self, names: Iterable[str]) -> None:
        """Have collectors look as soon as their groups can; their schedule is unchanged."""
        for group, _, _ in self._groups.values():
            for name in group.members.keys() & set(names):
                group.plan(group.members[name], self._monotonic())

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the workers."""
        for group, _, _ in self._groups.values():
            if isinstance(group, _Outside):
                yield from group.supervisor.samples()

    def status(self) -> Mapping[str, Any]:
        """Return whether the scheduler runs; the snapshot has the state of each collector."""
        return {"state": "ok" if self._groups else "off"}

    async def _saved(self, names: Iterable[str]) -> dict[str, str | OSError]:
        """Return the content of the collectors' state files by path, or the error for each."""
        found: dict[str, str | OSError] = {}
        for name in names:
            if self._state is None or not registry.all_collectors()[name].keeps_state:
                continue
            place = f"{self._state}/{name}.json"
            look = functools.partial(state_file.read_in_child, place, MAX_FILE)
            try:
                what = f"state of {name}"
                content = await background.call(look, what, state_writer.DEADLINE, OSError)
            except TimeoutError:
                found[place] = TimeoutError(errno.ETIMEDOUT, "the disk hangs", place)
            except OSError as error:
                found[place] = error
            else:
                found[place] = content.decode(errors="replace")
        return found

    async def _stop(self, worker: str | None) -> None:
        group, task, _ = self._groups.pop(worker)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await group.close()

    def _group(
        self,
        worker: str | None,
        options: Mapping[str, CollectorOptions],
        config: Config,
        saved: Mapping[str, str | OSError],
    ) -> _WorkerGroup:
        def read_saved(place: str) -> str:
            found = saved[place]
            if isinstance(found, OSError):
                raise found
            return found

        kinds = registry.all_collectors()
        now = self._monotonic()
        members = {name: _Member(kinds[name], table, now) for name, table in options.items()}
        context = Context(
            host=config.path.host,
            monotonic=self._monotonic,
            wall=self._wall,
            state=self._state,
            read_state=read_saved,
            services=self._services,
            tell=self.tell,
        )
        if worker is None:
            return _Inside(members, self._snapshot, context)
        hello = {
            "worker": worker,
            "host": encode(config.path.host),
            "state": None if self._state is None else str(self._state),
            "collectors": {name: encode(table) for name, table in options.items()},
            "log_level": logging.getLogger().level,
        }
        deadlines = {name: float(table.deadline) for name, table in options.items()}
        metrics = {name: registry.metrics(kinds[name]) for name in options}
        parallel = [name for name in options if kinds[name].parallel]
        return _Outside(
            members,
            self._snapshot,
            context,
            Supervisor(
                worker,
                hello,
                deadlines,
                metrics,
                self._monotonic,
                self._backoff,
                parallel=parallel,
                tell=self.tell,
            ),
        )
