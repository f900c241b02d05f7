"""The watch over the logs of this node's jobs, a bounded amount at a time.

It belongs in a separate process: each look may hang with its file system, and it matches lines that
users control. If there is too much to read, the newest part is read and the rest is counted.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.core import documents
from dshealthd.core.result import fault_of
from dshealthd.explain.finding import Finding, decide
from dshealthd.explain.recognition import Recognizer
from dshealthd.explain.tail import Tail
from dshealthd.jobs.logs import files
from dshealthd.jobs.logs.files import MAX_FILES, JobLogsOptions, LogFileState
from dshealthd.jobs.processes import TrainingProcess
from dshealthd.jobs.ranks import Ranks
from dshealthd.jobs.shares import MAX_JOBS, share_places
from dshealthd.linux.credentials import User
from dshealthd.linux.process_root import Root

if TYPE_CHECKING:
    from dshealthd.core.collector import Fault
    from dshealthd.core.host import Host

FIND_EVERY = 10.0
"""Seconds between two searches for the files of a job."""
FOLLOWED_AFTER = 30.0
"""Seconds for which logs are read after the last rank has exited: launchers write a summary."""
SHOWN_AFTER = 900.0
"""Seconds for which the cause of a failure is shown after that, or after the launcher has started
the ranks again, for people who look then.
"""
CPU_SHARE = 0.05
"""Largest share of a core's time spent on reading, which bounds the bytes read as well."""
CATCH_UP = 2.0
"""Most seconds of budget that a late look may use at once."""
MAX_BACKLOG = 8 << 20
"""Most unread bytes of a file; if there are more, the older ones are skipped."""
NEWEST = 1 << 20
"""Bytes at the end that are read of such a file, and of a file that is new to the watch."""
PIECE = 1 << 16
"""Bytes that are read at a time; the time spent is checked several times within a line."""
MAX_EVENTS = 2000
"""Events kept of one job."""
EARLIER = 60.0
"""Seconds before the start of a job's ranks from which a last write still counts as the job's."""


@dataclass(slots=True)
class _Job:
    name: str
    recognizer: Recognizer = field(default_factory=lambda: Recognizer(max_events=MAX_EVENTS))
    processes: list[TrainingProcess] = field(default_factory=list)
    user: int | None = None
    owner: User | None = None
    at_node: bool = False
    """Its processes see the node's own file system, which stays readable after they exit."""
    since: float = 0.0
    """Earliest time of the last write of its logs, in Unix time."""
    seen: float = 0.0
    """Monotonic time at which it last had a process."""
    find_at: float = -math.inf
    paths: dict[str, int | None] = field(default_factory=dict)
    """Files that it may write, with the rank if only one writes the file."""
    ranks: set[int] = field(default_factory=set)
    """Ranks of this attempt on this node, also those that have ended."""
    tails: dict[str, Tail] = field(default_factory=dict)
    states: Counter[LogFileState] = field(default_factory=Counter)
    left: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)
    """Files that were followed before, as between two attempts: device and inode, and how far they
    were read.
    """
    finding: Finding | None = None
    before: tuple[Finding, frozenset[int]] | None = None
    """The cause of the failure of an attempt before this one, and its ranks on this node."""
    until: float = -math.inf
    """Monotonic time until which that is shown."""
    newest: int = 0
    """Ticks from boot to the start of the last of its ranks."""
    overdrawn: float = 0.0
    """Seconds of CPU time beyond its share that it has used, and that its next shares pay for."""


class LogWatch:
    """The logs of this node's jobs, and the causes found in them."""

    def __init__(
        self,
        options: JobLogsOptions,
        host: Host,
        entering: Callable[[str], Fault | None],
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """Start without any jobs.

        `entering` is called before a job's files are touched.
        """
        self._options = options
        self._host = host
        self._entering = entering
        self._monotonic = monotonic
        self._wall = wall
        self._spent = time.process_time
        self._ranks = Ranks()
        self._jobs: dict[str, _Job] = {}
        self._looked = -math.inf
        self._turn = 0
        self.skipped = 0
        """Bytes skipped because logs grew faster than they may be read."""

    def update(self, processes: Sequence[TrainingProcess], boot: float) -> None:
        """Note the jobs whose logs to watch; process starts count from `boot`, in Unix time."""
        now = self._monotonic()
        found: dict[str, list[TrainingProcess]] = defaultdict(list)
        for process in processes:
            found[process.job].append(process)
        own: dict[str, list[TrainingProcess]] = defaultdict(list)
        for run in self._ranks.runs(processes, ""):
            own[run.job] += run.processes
        for name, members in found.items():
            job = self._jobs.setdefault(name, _Job(name))
            if not {p.pid for p in job.processes} & {p.pid for p in members}:
                job.find_at = -math.inf  # it is new or was restarted
            job.processes, job.user, job.seen = members, members[0].user, now
            job.since = boot + min(p.started for p in members) - EARLIER
            # While it has no ranks, its launcher is taken for one, which is older.
            starts = [p.start for p in own[name]]
            if job.newest < min(starts, default=0):
                self._begin_anew(job, now)
            if job.newest <= max(starts, default=-1):
                job.newest = max(starts)
                job.ranks |= {p.launch.rank for p in own[name]}
        for name, job in list(self._jobs.items()):
            if name not in found:
                job.processes = []
                kept = FOLLOWED_AFTER if _cause(job, now) is None else SHOWN_AFTER
                if now - job.seen > kept:
                    del self._jobs[name]
        placed = share_places(
            enumerate(self._jobs.values()),
            MAX_JOBS,
            lambda entry: (entry[1].user, entry[1].name, entry[0]),
        )
        self._jobs = {job.name: job for _, job in placed}

    def read_new(self) -> Iterator[Fault]:
        """Read what was appended to logs since the last look; yield a fault for unreadable logs."""
        now, spent = self._monotonic(), self._spent()
        elapsed = min(CATCH_UP, now - self._looked)
        self._looked = now
        jobs = self._followed()
        if not jobs:
            return
        self._turn = (self._turn + 1) % len(jobs)
        until = spent + CPU_SHARE * elapsed
        for number, job in enumerate(jobs[self._turn :] + jobs[: self._turn]):
            share = 1 / (len(jobs) - number)
            part = f"logs of {job.name}"
            if (fault := self._entering(part)) is not None:
                yield fault
                continue
            begun = self._spent()
            seconds = max(0.0, until - begun) * share - job.overdrawn
            if seconds > 0:
                try:
                    self._follow(job, len(jobs), begun + seconds)
                except (OSError, *documents.MISSHAPEN) as error:  # a line, or a defect
                    yield fault_of(part, error)
            job.overdrawn = max(0.0, self._spent() - begun - seconds)

    def findings(self) -> Iterator[tuple[str, Finding, frozenset[int]]]:
        """Yield each job whose logs show a cause, the finding, and its ranks on this node."""
        now = self._monotonic()
        for job in self._jobs.values():
            if (cause := _cause(job, now)) is not None:
                yield job.name, *cause

    @property
    def states(self) -> Counter[LogFileState]:
        """Number of log files of all jobs by state, as of the last searches."""
        total: Counter[LogFileState] = Counter()
        for job in self._jobs.values():
            total.update(job.states)
        return total

    def _begin_anew(self, job: _Job, now: float) -> None:
        """Begin with another attempt of a job, of which what its logs have said is not the cause
        of anything.
        """
        if job.finding is not None:
            job.before, job.until = _cause(job, now), now + SHOWN_AFTER
        job.finding, job.ranks = None, set()
        job.recognizer = Recognizer(max_events=MAX_EVENTS)
        for path in list(job.tails):
            _leave(job, path)

    def _followed(self) -> list[_Job]:
        now = self._monotonic()
        return [job for job in self._jobs.values() if now - job.seen <= FOLLOWED_AFTER]

    def _follow(self, job: _Job, jobs: int, until: float) -> None:
        root = self._root(job)
        if root is None:
            return
        with root:
            if self._monotonic() >= job.find_at:
                job.find_at = self._monotonic() + FIND_EVERY
                self._find(job, root, max(1, MAX_FILES // jobs))
            worked = False
            for number, path in enumerate(job.paths):
                now = self._spent()
                end = now + (until - now) / (len(job.paths) - number)
                worked |= self._examine(job, root, path, end)
        if worked:
            finding = decide(job.recognizer.found, now=self._wall())
            # While a job runs, words that no pattern knows are no reason for a ticket.
            is_clear = finding.outcome == "found" and finding.is_known
            job.finding = finding if is_clear else None

    def _root(self, job: _Job) -> Root | None:
        """Return the file system of a job's logs; None if out of reach after the job's end."""
        for process in job.processes:
            try:
                root = Root.of_process(self._host, process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            job.owner = root.owner
            with Root.of_user(self._host.rootfs, root.owner) as node:
                job.at_node = node.place[:2] == root.place[:2]
            return root
        if job.at_node and job.owner is not None:
            return Root.of_user(self._host.rootfs, job.owner)
        return None

    def _find(self, job: _Job, root: Root, limit: int) -> None:
        job.states = Counter()
        writers: dict[str, set[int]] = defaultdict(set)
        if self._options.standard_streams:
            for process in job.processes:
                try:
                    streams = files.standard_streams(self._host, process.pid)
                except (FileNotFoundError, ProcessLookupError):
                    continue
                for path in streams:
                    writers[path].add(process.launch.rank)
        if not job.processes:
            writers.update({path: set() for path in job.paths})
        is_sole = sum(other.user == job.user for other in self._followed()) == 1
        candidates = dict.fromkeys(writers, True)
        for path, is_own in files.log_paths(root, self._options.paths, job.name):
            candidates[path] = candidates.get(path, False) or is_own or is_sole
        known, job.paths = job.paths, {}
        for path, is_certain in candidates.items():
            try:
                found = root.stat(path)
            except OSError:
                job.states[LogFileState.UNREADABLE] += 1
                continue
            if found is None:
                continue
            if path not in known and not files.is_log(found, root.owner.uid, job.since):
                job.states[LogFileState.FOREIGN] += 1
            elif not is_certain:
                job.states[LogFileState.AMBIGUOUS] += 1
            elif len(job.paths) >= limit:
                job.states[LogFileState.LEFT_OUT] += 1
            else:
                ranks = writers.get(path, set())
                job.paths[path] = next(iter(ranks)) if len(ranks) == 1 else known.get(path)
        job.states[LogFileState.FOLLOWED] = len(job.paths)
        for path in job.tails.keys() - job.paths.keys():
            _leave(job, path)

    def _examine(self, job: _Job, root: Root, path: str, until: float) -> bool:
        """Examine what was appended to one log file; return whether there was anything."""
        try:
            descriptor = root.open(path)
        except FileNotFoundError:
            return False  # moved away; the next search finds its successor
        worked = False
        try:
            status = os.fstat(descriptor)
            if status.st_uid != root.owner.uid:
                return False
            tail = job.tails.get(path)
            if tail is None or not tail.continues(status):
                is_new, (identity, offset) = tail is None, job.left.pop(path, (None, 0))
                tail = Tail(job.recognizer, path, status, rank=job.paths[path])
                job.tails[path] = tail
                if identity == tail.identity and status.st_size >= offset:
                    tail.skip_to(offset - 1)  # which ends a line
                elif is_new and status.st_size > NEWEST:
                    tail.skip_to(status.st_size - NEWEST)
            if status.st_size - tail.offset > MAX_BACKLOG:
                self.skipped += tail.skip_to(status.st_size - NEWEST)
            while self._spent() < until:
                if not (tail.is_busy or tail.read(descriptor, PIECE)):
                    break
                tail.work(lambda: self._spent() >= until)
                worked = True
        finally:
            os.close(descriptor)
        return worked


def _leave(job: _Job, path: str) -> None:
    """Follow a file no longer, and remember how far it was read."""
    tail = job.tails.pop(path)
    job.left[path] = tail.identity, tail.offset
    while len(job.left) > MAX_FILES:
        del job.left[next(iter(job.left))]


def _cause(job: _Job, now: float) -> tuple[Finding, frozenset[int]] | None:
    """Return the cause of a job's failure that is shown, of an earlier attempt not for ever, and
    the ranks that the attempt had on this node.
    """
    if job.finding is not None:
        return job.finding, frozenset(job.ranks)
    return job.before if now < job.until else None
