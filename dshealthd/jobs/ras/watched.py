"""A job that this node queries for its RAS status: its state, and when the next query is due.

A query goes through all processes of a job, so a healthy job is queried rarely. A job is queried at
the next check if its last query failed, if its last answer showed ranks in trouble or no progress,
if a rank of this node has ended or is stopped, or after a hardware error of the node. It is queried
at once, but seldom, if heartbeats make a hang likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dshealthd.core.collector import Sample
from dshealthd.core.host import Host, read_bytes
from dshealthd.jobs.processes import Key, read_stat
from dshealthd.jobs.ras.address import is_own_address
from dshealthd.jobs.ras.evaluation import JobProgress
from dshealthd.jobs.ras.question import Loaded
from dshealthd.jobs.ras.status import RasRankState, Status

CLOSELY = 40
"""Consecutive answers without progress after which a job is queried as rarely as a healthy one.

This is 10 minutes at 15 s: a hang has been paged for by then. A job that is idle on purpose, or
whose operations NCCL does not count (CUDA graphs, send and receive), must not be queried closely
forever.
"""
HURRIES, HURRY_WINDOW = 2, 60.0
"""Most queries brought forward, and the seconds in which they are counted: enough for two answers
that can be compared, but no more if a suspicion comes and goes.
"""
_JITTER = 1.0
"""Seconds by which a check may come early, measured from the previous one.

Checks come every 15 s: one that is 29.99 s after a query must not delay the next query to 45 s.
"""
_STOPPED = "TtZXx"


def dead_here(status: Status) -> set[int]:
    """Return the pids of this node that a RAS answer names as dead."""
    places = {
        trouble.place
        for communicator in status.communicators
        for trouble in communicator.troubles
        if trouble.what == RasRankState.DEAD and trouble.place is not None and trouble.place.host
    }
    local = {host for host in {place.host for place in places} if is_own_address(host)}
    return {place.pid for place in places if place.host in local}


def own_pid(host: Host, pid: int) -> int | None:
    """Return a process's pid in its innermost namespace, which its RAS uses; None if unknown."""
    try:
        status = read_bytes(host.proc(f"{pid}/status"))
    except OSError:
        return None
    for line in status.split(b"\n"):
        if line.startswith(b"NSpid:"):
            last = line.split()[-1]
            return int(last) if last.isdigit() else None
    return None


@dataclass(slots=True)
class WatchedJob:
    """A job that this node queries."""

    progress: JobProgress = field(default_factory=JobProgress)
    status: Status | None = None
    """The last plausible answer; None before the first."""
    loaded: Loaded | None = None
    responder: int | None = None
    """Pid of the process that answered last."""
    ended: str = ""
    """Why the job is not queried until its processes or libraries change; empty if it is."""
    split: bool = False
    """Whether RAS is in parts that take each other for dead."""
    samples: Sequence[Sample] = ()
    """Samples of the last answer, exported again until the next."""
    _dead: set[int] = field(default_factory=set)
    """Pids on this node that an answer has called dead, in their own namespaces."""
    _looked: float = -math.inf
    """Monotonic time of the last query, or of the last check of the job's libraries."""
    _rarely: bool = False
    _refused: bool = False
    _starts: frozenset[Key] = frozenset()
    _hurried: tuple[float, ...] = ()
    """Monotonic times at which queries were brought forward."""
    _regular: float = -math.inf
    """Monotonic time from which an answer does not count as early."""

    def due(self, host: Host, now: float, healthy_interval: float) -> bool:
        """Return whether to query the job's RAS at `now`, by the monotonic clock."""
        return (
            not self._rarely
            or self.rested(now, healthy_interval)
            or any(_in_trouble(host, process) for process in self._starts)
        )

    def rested(self, now: float, seconds: float) -> bool:
        """Return whether `seconds` have passed since the last query, or since the last check of the
        job's libraries.
        """
        return now - self._looked >= seconds - _JITTER

    def hurry(self, now: float) -> bool:
        """Return whether a query may be brought forward to `now`, and count it if so.

        It would not help for a job that may not be queried, or whose RAS is split.
        """
        if self.split or self._refused:
            return False
        recent = tuple(at for at in self._hurried if now - at < HURRY_WINDOW)
        if len(recent) == HURRIES:
            return False
        self._hurried = (*recent, now)
        return True

    def watch_closely(self) -> None:
        """Query the job's RAS at the next check, although the job was healthy."""
        self._rarely = self.split or self._refused

    def record_loaded(self, loaded: Loaded, starts: frozenset[Key], now: float) -> None:
        """Record what the job's processes have loaded.

        An implausible answer is forgotten after the job has restarted or runs with other libraries,
        but not if only one of its processes has ended.
        """
        changed = self.loaded is None or loaded.versions != self.loaded.versions
        if changed or self._starts.isdisjoint(starts):
            self.ended, self.status, self.split = "", None, False
            self._dead.clear()
        self.loaded, self._starts, self._looked = loaded, starts, now
        self._rarely = self._refused = False

    def refused(self) -> None:
        """Note that the job's RAS may not be queried: the job is checked rarely."""
        self._rarely = self._refused = True

    def answered(self, status: Status, answerer: int | None, interval: float = 0.0) -> None:
        """Record a plausible RAS answer.

        `interval` is the usual time in seconds between two answers of a job that is not healthy;
        `answerer` is the answering process's pid in its own namespace.
        """
        self._dead |= dead_here(status)
        # A process that any answer has called dead and that answers proves the split.
        if self.split or answerer in self._dead:
            self.split, self.status, self._rarely = True, status, True
            self.progress = JobProgress()
            return
        # Progress needs two answers, so the second query comes soon.
        first = self.status is None
        self._update_progress(status, interval)
        self.status = status
        idle = self.progress.idle or 0
        trouble = any(communicator.troubles for communicator in status.communicators)
        self._rarely = not first and (idle > CLOSELY or (idle == 0 and not trouble))

    def _update_progress(self, status: Status, interval: float) -> None:
        before = self.progress.idle
        early = self._looked < self._regular - _JITTER
        self.progress.update(status, early=early)
        if not early or self.progress.idle == 0:
            self._regular = self._looked + interval
        elif not before:  # it replaces the next regular answer
            self._regular += interval

    def disbelieve(self, why: str) -> None:
        """Record an answer that cannot be true: the job is not queried again."""
        self.ended, self.status, self._rarely = why, None, True


def _in_trouble(host: Host, process: Key) -> bool:
    """Return whether a process of the job has ended or is stopped."""
    pid, start = process
    try:
        stat = read_stat(host, pid)
    except (OSError, ValueError, ArithmeticError):
        return True
    return stat.start != start or stat.state in _STOPPED
