"""What the kernel tells of ranks that send no heartbeats: which are stopped, hang in the kernel, or
have ended while others of their run go on, and since when.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dshealthd.jobs.hangs.exits import KEPT, ExitKind, read_exit
from dshealthd.jobs.hangs.states import STOPPED
from dshealthd.jobs.processes import Key, TrainingProcess, boot_id
from dshealthd.jobs.ranks import Ranks, Run
from dshealthd.jobs.shares import share_places
from dshealthd.linux.activity import ThreadState, activity

if TYPE_CHECKING:
    from dshealthd.core.host import Host

MAX_RANKS = 256
"""Most ranks that are followed: each takes a descriptor, and some 0.1 ms of each sample. Users take
turns, then runs. Nothing is known of the others.
"""
End: TypeAlias = "tuple[_RankProcess, ExitKind, float]"
"""A process that has ended, how, and the monotonic time of the sample that saw it."""
_SIGNALS = {ExitKind.KILLED, ExitKind.CRASHED}


class RankTrouble(NamedTuple):
    """A rank of which its process shows why others may wait for it."""

    job: str
    rank: int
    pid: int
    what: str
    """`stopped`, `blocked`, or how it ended (`ExitKind`)."""
    seconds: float
    """Time since that was first seen."""
    over: bool = False
    """Whether its run has ended with it."""


class _RankProcess(NamedTuple):
    run: tuple[str, str]
    """Job and name of the run."""
    rank: int
    pid: int
    descriptor: int
    """A pidfd; -1 if there is none."""
    launcher: tuple[int, str] | None
    user: int | None


class RankProcesses:
    """The processes of the ranks of this node's jobs, from sample to sample."""

    def __init__(self, host: Host) -> None:
        """Start without processes."""
        self._host = host
        self._ranks = Ranks()
        self._followed: dict[Key, _RankProcess] = {}
        self._ended: dict[Key, End] = {}
        self._failed: list[End] = []
        """The ranks that runs have ended with."""
        self._states: dict[Key, tuple[ThreadState, float]] = {}
        """The state of each rank that is stopped or blocked, and since when."""
        self.threads: dict[str, dict[Key, tuple[float, float]]] = {}
        """CPU seconds of each rank's main thread and of all its threads, by job, where they are
        known and it is not stopped.
        """

    def troubles(self, processes: Sequence[TrainingProcess], now: float) -> Iterator[RankTrouble]:
        """Update with all training processes at monotonic time `now`; yield the ranks in trouble.

        A run of which all processes that are followed are stopped was suspended, and has none.
        """
        runs = self._ranks.runs(processes, boot_id(self._host))
        self._follow(runs, now)
        before, self._states, self.threads = self._states, {}, {}
        for run in runs:
            states: dict[Key, tuple[int, ThreadState, float]] = {}
            for rank, members in run.ranks.items():
                for process in members:
                    key = process.key
                    if key not in self._followed:
                        continue
                    state = self._state(run.job, key)
                    was, since = before.get(key, (state, now))
                    states[key] = rank, state, since if was is state else now
            if all(state is ThreadState.STOPPED for _, state, _ in states.values()):
                continue
            for key, (rank, state, since) in states.items():
                if state in {ThreadState.STOPPED, ThreadState.BLOCKED}:
                    self._states[key] = state, since
                    yield RankTrouble(run.job, rank, key[0], str(state), now - since)
        for over, ends in ((False, self._ended.values()), (True, self._failed)):
            for followed, how, at in ends:
                job, rank, pid = followed.run[0], followed.rank, followed.pid
                yield RankTrouble(job, rank, pid, str(how), now - at, over)

    def close(self) -> None:
        """Release the processes."""
        for followed in self._followed.values():
            _release(followed)
        self._followed = {}

    def _state(self, job: str, key: Key) -> ThreadState:
        try:
            found = activity(self._host, *key)
        except (OSError, ValueError, ArithmeticError):
            found = None
        if found is None:
            return ThreadState.UNKNOWN
        if found.thread_seconds is not None and found.state not in STOPPED:
            self.threads.setdefault(job, {})[key] = found.thread_seconds, found.cpu_seconds
        return found.state

    def _follow(self, runs: Sequence[Run], now: float) -> None:
        """Note which processes have ended since; those of a run count while others of it run, until
        its rank has a new process, and a run's own failure once all have ended.
        """
        living = {
            process.key: ((run.job, run.name), rank, process)
            for run in runs
            for rank, members in run.ranks.items()
            for process in members
        }
        for key in self._followed.keys() - living.keys():
            followed = self._followed.pop(key)
            # One that runs was no rank's own process: a launcher, before its ranks were seen.
            if (how := read_exit(self._host, *key, followed.descriptor)) is not None:
                self._ended[key] = followed, how, now
            _release(followed)
        places = {(run, rank) for run, rank, _ in living.values()}
        going = {run for run, _ in places}
        launchers = {process.launcher for *_, process in living.values()} - {None}
        self._failed = [
            end
            for end in self._failed
            if end[0].run not in going and end[0].launcher not in launchers and now - end[2] < KEPT
        ]
        for run in {end[0].run for end in self._ended.values()} - going:
            self._failed += _failures([end for end in self._ended.values() if end[0].run == run])
        self._failed = share_places(
            self._failed, MAX_RANKS, lambda end: (end[0].user, end[0].run, -end[2])
        )
        self._ended = {
            key: end
            for key, end in self._ended.items()
            if end[0].run in going
            and (end[0].run, end[0].rank) not in places
            and now - end[2] < KEPT
        }
        wanted = share_places(
            living.values(), MAX_RANKS, lambda one: (one[2].user, one[0], one[2].start)
        )
        for key in self._followed.keys() - {process.key for *_, process in wanted}:
            _release(self._followed.pop(key))
        for run, rank, process in wanted:
            if process.key not in self._followed:
                pid = process.pid
                try:
                    descriptor = os.pidfd_open(pid)
                except OSError:  # before Linux 5.3, or it has just ended
                    descriptor = -1
                self._followed[process.key] = _RankProcess(
                    run, rank, pid, descriptor, process.launcher, process.user
                )


def _failures(ends: Sequence[End]) -> Iterator[End]:
    """Yield the ends that a run ended with: by a signal that no launcher sends at first, seen in
    the first of the samples that saw one. Where all ended so, somebody ended the run.
    """
    first = min(at for _, _, at in ends)
    found = [end for end in ends if end[1] in _SIGNALS and end[2] == first]
    if len(found) < len(ends):
        yield from found


def _release(followed: _RankProcess) -> None:
    if followed.descriptor >= 0:
        os.close(followed.descriptor)
