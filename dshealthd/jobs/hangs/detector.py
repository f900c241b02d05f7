"""The hang detector: which jobs stand still on this node, check by check."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.exits import ExitKind, ExitWatcher
from dshealthd.jobs.hangs.judge import Standstill, judge
from dshealthd.jobs.hangs.states import NO_WORK, SUSPECTED, RankState, Work
from dshealthd.jobs.hangs.watch import RankWatch

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.jobs.heartbeats.identity import Identity
    from dshealthd.jobs.heartbeats.sender import Sender
    from dshealthd.jobs.options import HangOptions

SLACK = 3.0
"""Most intervals between two checks that count as silence; time beyond that is ignored."""
AT_WORK = 30.0
"""Seconds for which a silent job counts as at work after it was last seen to be: evaluations wait
for data, simulators for each other, and samples are moments.
"""
SAMPLED = 20.0
"""Seconds of silence from which samples are not those of a job's last step: by default the agent
shows for 10 s what the child processes did in the 10 s before.
"""
AGAIN_AFTER = 5.0
"""Seconds between reports of a lasting suspicion; a running job completes a step in between."""


class HangDetector:
    """A detector that watches the ranks that send heartbeats, and their processes."""

    def __init__(
        self,
        options: HangOptions,
        host: Host,
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        work: Callable[[str], Work] = lambda _job: NO_WORK,
    ) -> None:
        """Start without ranks, in the running loop, which is notified when processes exit.

        `work` returns what the GPUs, files and sockets of a job on this node show.
        """
        self._monotonic = monotonic
        self._wall = wall
        self._work = work
        self._floor = float(options.floor)
        self._exit_watcher = ExitWatcher(host, asyncio.get_running_loop(), wall)
        self.watch = RankWatch(
            host, self._exit_watcher, slack=SLACK * options.interval, floor=self._floor
        )
        self._found: Mapping[str, Standstill] = {}
        """Standstills by job, as of the last check."""
        self._worked: dict[tuple[str, str], tuple[float, str | bool]] = {}
        """When each silent job was last seen at work, and what showed it, by field of `Work`."""
        self.jobs: Mapping[str, Sequence[RankState]] = {}
        """The ranks of each job, as of the last check."""
        self.standstills: Mapping[str, Standstill] = {}
        """Confirmed standstills by job: two checks in a row have seen them."""

    @property
    def reported(self) -> Iterator[Standstill]:
        """The hangs, and those standstills that are one unless a rank elsewhere is at work."""
        for found in self.standstills.values():
            if not found.is_pause or found.reason is HangClass.COLLECTIVE:
                yield found

    def check(self, ranks: Mapping[tuple[str, int], Sequence[tuple[Identity, Sender]]]) -> None:
        """Check for hangs now; if a rank has several processes, the latest counts."""
        present = {}
        for place, senders in ranks.items():
            who, sender = senders[-1]
            if sender.message is not None:
                present[place] = who, sender.message
        unusual = {job for job, found in self._found.items() if not found.teaches}
        self.watch.check(present, self._monotonic(), unusual)
        self.jobs = self.watch.jobs()
        wall = self._wall()
        found = {}
        for job, states in self.jobs.items():
            if _is_quiet(states):
                # What its children do now may explain why it stands still later. What NCCL does
                # would be that of its last step: RAS is asked for that twice a minute.
                self._seen(job, "computes")
            work = partial(self._seen, job, "says", "computes")
            if standstill := judge(job, states, wall, work, self._floor):
                found[job] = standstill
        self.standstills = {job: still for job, still in found.items() if job in self._found}
        self._found = found
        self._worked = {of: seen for of, seen in self._worked.items() if of[0] in self.jobs}

    def _seen(self, job: str, *names: str) -> Work:
        """Return the work of a job that is silent, now or a moment ago: these fields of it."""
        now, work = self._monotonic(), self._work(job)
        for name in names:
            if seen := getattr(work, name):
                self._worked[job, name] = now, seen
            at, seen = self._worked.get((job, name), (-math.inf, seen))
            if now - at <= AT_WORK:
                work = work._replace(**{name: seen})
        return work

    def close(self) -> None:
        """Release the processes that the detector watches."""
        self._exit_watcher.close()


class Suspicions:
    """The suspected jobs, remembered so that each suspicion is reported at most twice."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        """When each suspicion that lasts is reported again."""

    def due(self, jobs: Mapping[str, Sequence[RankState]], now: float) -> Iterator[str]:
        """Yield the jobs to report at monotonic time `now`: new suspicions, lasting ones once."""
        suspected = [job for job, ranks in jobs.items() if suspicious(ranks)]
        self._due = {job: due for job, due in self._due.items() if job in suspected}
        for job in suspected:
            due = self._due.get(job)
            if due is None or now >= due:
                self._due[job] = now + AGAIN_AFTER if due is None else math.inf
                yield job


def _is_quiet(ranks: Sequence[RankState]) -> bool:
    """Return whether a job's ranks on this node have been silent for half of what is usual, and for
    so long that samples are not those of their last step.
    """
    living = [rank for rank in ranks if rank.ended is None]
    return bool(living) and all(
        rank.silence > max(SUSPECTED * rank.bound, SAMPLED) for rank in living
    )


def suspicious(ranks: Sequence[RankState]) -> bool:
    """Return whether a job's ranks on this node look as at the beginning of a hang."""
    living = [rank for rank in ranks if rank.ended is None]
    if not living:
        return False
    if any(rank.stopped for rank in living):
        return True
    if any(rank.ended not in {None, ExitKind.ENDED} for rank in ranks):
        return True
    return all(rank.silence > SUSPECTED * rank.bound for rank in living)
