"""A job that this node asks for its RAS status: what is remembered, when it is asked next.

A query goes through all processes of a job, so that one that is well is asked rarely. It is asked
at the next look where its last answer was no answer, showed ranks in trouble or no progress, or
where a rank of this node has ended or is stopped; after an error of the node's hardware as soon as
one that is not well; and at once, but seldom, where heartbeats make a hang likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.core.collector import Sample
from dshealthd.core.host import read_bytes
from dshealthd.jobs.ras.progress import JobProgress
from dshealthd.jobs.ras.question import Loaded
from dshealthd.jobs.ras.split import dead_here
from dshealthd.jobs.ras.status import Status
from dshealthd.linux.process_stat import parse_stat

if TYPE_CHECKING:
    from dshealthd.core.host import Host

Process = tuple[int, int]
"""Pid and start time."""
CLOSELY = 40
"""Answers in a row without progress after which a job is asked as rarely as one that is well.

10 minutes at 15 s: a hang has been paged for by then, and a job that is idle on purpose, or whose
operations NCCL does not count (CUDA graphs, send and receive), must not be asked closely for ever.
"""
HURRIES, HURRY_WINDOW = 2, 60.0
"""So many queries may be brought forward in so many seconds: enough for two answers that can be
compared, and no more where a suspicion comes and goes.
"""
_JITTER = 1.0
"""Seconds by which a look may come early, measured from the one before.

Looks come every 15 s: one that counts as 29.99 s later must not put a query off to 45 s.
"""
_STOPPED = "TtZXx"


@dataclass(slots=True)
class WatchedJob:
    """A job that this node asks."""

    progress: JobProgress = field(default_factory=JobProgress)
    status: Status | None = None
    """The last answer that was believed; None before there is one."""
    loaded: Loaded | None = None
    responder: int | None = None
    """Pid of the process that answered last."""
    ended: str = ""
    """Why the job is not asked any more, until its processes or libraries change."""
    split: bool = False
    """Whether RAS is in parts that take each other for dead: see `dshealthd.jobs.ras.split`."""
    implausible: int = 0
    """Answers that could not be true."""
    samples: Sequence[Sample] = ()
    """What was exported of the last answer, exported again until the next."""
    _dead: set[int] = field(default_factory=set)
    """Pids on this node that an answer has called dead, as their own namespaces number them."""
    _looked: float | None = None
    _rarely: bool = False
    _refused: bool = False
    _starts: frozenset[Process] = frozenset()
    _hurried: tuple[float, ...] = ()
    """When queries were brought forward."""
    _regular: float = -math.inf
    """From when on, by the monotonic clock, an answer is not an early one."""

    def due(self, host: Host, now: float, healthy_interval: float) -> bool:
        """Tell whether to ask the job's RAS at `now`, by the monotonic clock."""
        if self._looked is None or not self._rarely:
            return True
        if now - self._looked >= healthy_interval - _JITTER:
            return True
        return any(_in_trouble(host, process) for process in self._starts)

    def rested(self, now: float, seconds: float) -> bool:
        """Tell whether so many seconds have passed since the last RAS query, or since the last look
        at its libraries.
        """
        return self._looked is None or now - self._looked >= seconds - _JITTER

    def hurry(self, now: float) -> bool:
        """Tell whether a RAS query may be brought forward to `now`, and count it if so.

        One that is not asked, or whose parts of RAS contradict each other, has nothing to tell
        sooner.
        """
        if self.split or self._refused:
            return False
        recent = tuple(at for at in self._hurried if now - at < HURRY_WINDOW)
        if len(recent) == HURRIES:
            return False
        self._hurried = (*recent, now)
        return True

    def watch_closely(self) -> None:
        """Ask the job's RAS at the next look, though it was well."""
        self._rarely = self.split or self._refused

    def looked(self, loaded: Loaded, starts: frozenset[Process], now: float) -> None:
        """Take what the watched job's processes have loaded.

        What an answer was disbelieved for is over once the job has restarted, or runs with other
        libraries; not where one of its processes has ended.
        """
        changed = self.loaded is None or loaded.versions != self.loaded.versions
        if changed or self._starts.isdisjoint(starts):
            self.ended, self.status, self.split = "", None, False
            self._dead.clear()
        self.loaded, self._starts, self._looked = loaded, starts, now
        self._rarely = self._refused = False

    def refused(self) -> None:
        """Note that the job's RAS may not be asked: it is looked at rarely."""
        self._rarely = self._refused = True

    def answered(
        self, status: Status, now: float, answerer: int | None, interval: float = 0.0
    ) -> None:
        """Take a RAS answer that can be true, given at `now`, in Unix time.

        `interval` is the usual time between two answers of a job that is not well, in seconds;
        `answerer` is the pid of who gave it, as its own namespace numbers it.
        """
        self._dead |= dead_here(status)
        # Called dead by any answer so far, and answering: that proves the split.
        if self.split or answerer in self._dead:
            self.split, self.status, self._rarely = True, status, True
            self.progress = JobProgress()
            return
        # Progress takes two answers, so the second one is asked for soon.
        first = self.status is None
        self._update_progress(status, now, interval)
        self.status = status
        idle = self.progress.idle or 0
        trouble = any(status.processes.values()) or any(
            communicator.troubles for communicator in status.communicators
        )
        self._rarely = not first and (idle > CLOSELY or (idle == 0 and not trouble))

    def _update_progress(self, status: Status, now: float, interval: float) -> None:
        asked = self._looked or 0.0
        before = self.progress.idle
        early = asked < self._regular - _JITTER
        self.progress.update(status, now, early=early)
        if not early or self.progress.idle == 0:
            self._regular = asked + interval
        elif not before:  # it stands for the regular one that would have come next
            self._regular += interval

    def disbelieve(self, why: str) -> None:
        """Take a RAS answer that cannot be true: the job is not asked any more."""
        self.implausible += 1
        self.ended, self.status, self._rarely = why, None, True


def _in_trouble(host: Host, process: Process) -> bool:
    """Tell whether a process of a job that RAS is asked about has ended or is stopped."""
    pid, start = process
    try:
        stat = parse_stat(read_bytes(host.proc(f"{pid}/stat"), 4096))
    except (OSError, ValueError):
        return True
    return stat.start != start or stat.state in _STOPPED
