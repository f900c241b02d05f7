"""The watch over the ranks of this node: how long each is silent, what its process does, and how it
ended.

Silence is counted only while the watch runs, so a stopped agent or a suspended machine makes no
rank overdue. It does not depend on the system clock, which may be set.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from dshealthd.core import schema
from dshealthd.jobs.environment import watchdog_seconds
from dshealthd.jobs.hangs.exits import KEPT, End, ExitWatcher
from dshealthd.jobs.hangs.judge import NOTICE, UNEXPLAINED
from dshealthd.jobs.hangs.silence import FLOOR, SHOWN, SilenceBaseline
from dshealthd.jobs.hangs.states import STOPPED, SUSPECTED, RankState, operation
from dshealthd.jobs.heartbeats.identity import Identity
from dshealthd.jobs.heartbeats.reader import MAX_SENDERS
from dshealthd.jobs.shares import Claim, share_places
from dshealthd.linux.activity import (
    MAX_THREADS,
    Activity,
    ThreadState,
    activity,
    busiest,
    demands,
    thread_of,
    waits_for_storage,
)
from dshealthd.training.message import Message, Phase, StepStage

if TYPE_CHECKING:
    from dshealthd.core.host import Host

GRACE = 3
"""Checks for which a process that has stopped reporting is kept.

Its connection closes a little before it exits.
"""
SELDOM = 5
"""Checks of a rank per check of its process, while its heartbeats arrive."""
REMEMBERED = 60.0
"""Seconds within which a rank must report again for its saved baseline to count."""
FRESH = 2.0
"""Seconds of silence below which a rank's heartbeats count as arriving."""
WINDOW = 30.0
"""Seconds, at least, over which the CPU time of a silent rank is averaged, and twice that at most:
one that has stopped to compute is soon seen to be idle.
"""
WAITING = KEPT / 2
"""Seconds of silence from which a living rank counts as waiting for those that have ended."""
THREADS = 8 * MAX_THREADS
"""Threads of all ranks that are looked at in a check, in which the agent's loop waits: some 40 ms.
The other ranks have their turn in the next checks: users take turns, then jobs.
"""

T = TypeVar("T")
Place = tuple[str, int]
"""Job and rank."""


@dataclass(slots=True)
class Watched:
    """One rank's process."""

    who: Identity
    message: Message
    baseline: SilenceBaseline
    checks: tuple[tuple[Activity, float], ...] = ()
    """What it had done, with the watch's time, since its last heartbeat: when WINDOW began, when
    the next one did, and at the last check of its process.
    """
    demands: tuple[tuple[Mapping[int, float], float], ...] = ()
    """The same of what each of its threads wanted of CPUs, at its turns."""
    threads: int = MAX_THREADS
    """How many of them are looked at."""
    turn: float = 0.0
    """The watch's time at which its threads were looked at last."""
    thread: int | None = None
    """Its training's thread, once it was looked for."""
    state: ThreadState = ThreadState.UNKNOWN
    stored_at: float | None = None
    """The watch's time at which one of its threads was last seen to wait for storage in a marked
    phase."""
    may_store: bool = False
    """Whether one may do so now, as they had no turn."""
    stopped_at: float | None = None
    """The watch's time at which its process was first seen stopped; None while it is not."""
    phase_began: float = 0.0
    """The watch's time at which it entered its phase, or was first seen in it."""
    collective_at: float = 0.0
    """The watch's time at which it was first seen in the collective that its message tells."""
    unheard: int = 0
    """Consecutive checks in which it was not among the senders."""
    end: End | None = None
    ended_at: float = 0.0
    """The watch's time at which its end was noticed."""

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time of the watched rank."""
        return self.who.process.key

    def share(self, seconds: Callable[[Activity], float | None]) -> float | None:
        """Return the share of a core's time that some count of seconds took of late."""
        if not (passed := _passed(self.checks)):
            return None
        before, after = seconds(self.checks[0][0]), seconds(self.checks[-1][0])
        return None if before is None or after is None else (after - before) / passed

    @property
    def cpu(self) -> float | None:
        """The share of a core's time that its threads used, or that one of them was ready to."""
        share = self.share(lambda activity: activity.work_seconds)
        if share is None or not (passed := _passed(self.demands)):
            return share
        return max(share, busiest(self.demands[0][0], self.demands[-1][0]) / passed)

    def suspected(self, clock: float) -> bool:
        """Return whether it is soon to be decided what its threads do."""
        return self.baseline.silence(clock) > SUSPECTED * self.baseline.idle_bound

    def at(self, clock: float) -> RankState:
        """Return the rank's state at this time of the watch."""
        pid, start = self.key
        silence, bound = self.baseline.silence(clock), self.baseline.bound
        timeout = watchdog_seconds(self.who.process.environment, self.message.timeout)
        # Another thread than the training's may wait for a CPU.
        is_unseen = self.suspected(clock) and not _passed(self.demands)
        collective, since = operation(self.message.collective[0]), clock - self.collective_at
        if collective and self.message.phase != Phase.TRAINING:
            # However long the phase is, the watchdog ends the job once this collective times out.
            left = max(FLOOR, timeout - NOTICE - UNEXPLAINED)
            bound = min(bound, silence - since + left)
        return RankState(
            rank=self.who.process.launch.rank,
            pid=pid,
            start=start,
            step=self.message.step,
            phase=Phase(self.message.phase),
            stage=StepStage(self.message.stage),
            forward_pass=self.message.forward_pass,
            forward_passes=self.message.forward_passes,
            silence=silence,
            bound=bound,
            idle_bound=self.baseline.idle_bound,
            stores=self.may_store
            or (self.stored_at is not None and clock - self.stored_at <= WINDOW),
            state=self.state,
            user=self.who.process.user,
            world_size=self.who.process.launch.world_size,
            ended=self.end.how if self.end is not None else None,
            ended_at=self.end.at if self.end is not None else None,
            settled=self.baseline.knows_training,
            cpu=self.cpu,
            thread_cpu=None if is_unseen else self.share(lambda activity: activity.thread_seconds),
            on_gpu=self.message.memory is not None,
            timeout=timeout,
            stopped_for=0.0 if self.stopped_at is None else clock - self.stopped_at,
            phase_seconds=clock - self.phase_began,
            collective=collective,
            collective_for=since,
        )


@dataclass(frozen=True, slots=True)
class SavedRank:
    """What a later agent of this boot is told of a rank, so that it knows what is usual."""

    pid: Annotated[int, schema.Integer()]
    start: Annotated[int, schema.Integer()]
    user: Annotated[int, schema.Integer()]
    sent: float
    """When its last message was sent."""
    clock: float
    """The watch's time."""
    baseline: SilenceBaseline


class RankWatch:
    """The ranks of this node that send heartbeats, and for a while those that did."""

    def __init__(
        self, host: Host, exit_watcher: ExitWatcher, *, slack: float, floor: float = FLOOR
    ) -> None:
        """Start without ranks.

        `slack` is the most seconds between two checks that count; `floor` as for `SilenceBaseline`.
        """
        self._host = host
        self._exit_watcher = exit_watcher
        self._slack = slack
        self._floor = floor
        self._now: float | None = None
        self._clock = 0.0
        self._count = 0
        self._left = 0
        """Threads that may be looked at in this check."""
        self.watched: dict[Place, Watched] = {}
        self._saved: dict[tuple[int, int], SavedRank] = {}
        """Those of an earlier agent, by pid and start."""

    def restore(self, saved: Iterable[SavedRank]) -> None:
        """Restore what was `saved`; it applies to processes that report again."""
        self._saved = {(rank.pid, rank.start): rank for rank in saved}

    def saved(self) -> list[SavedRank]:
        """Return the baselines of the running ranks, for a later agent."""
        return [
            SavedRank(*one.key, user, one.message.sent, self._clock, one.baseline)
            for one in self.watched.values()
            if one.end is None and (user := one.who.process.user) is not None
        ] + list(self._saved.values())

    def check(
        self,
        present: Mapping[Place, tuple[Identity, Message]],
        now: float,
        unusual: Collection[str] = (),
    ) -> None:
        """Check the ranks' latest heartbeats and processes, at monotonic time `now` in seconds.

        A silence that ends is learnt as usual, except those of the jobs that are `unusual`.
        """
        elapsed = 0.0 if self._now is None else min(now - self._now, self._slack)
        self._now = now
        self._clock += elapsed
        self._count += 1
        if self._clock > REMEMBERED:
            self._saved.clear()
        places = {who.process.key: at for at, (who, _) in present.items()}
        for place, known in list(self.watched.items()):
            if places.get(known.key, place) != place:
                # Its job has another name: another user's process owned or owns the one it claims.
                del self.watched[place]  # its exit is still watched, for the new place
        for place, (who, message) in present.items():
            # The send time is the sender's claim. The message was not there at the last check, so
            # it is not older than that.
            heard = self._clock - min(max(now - message.sent, 0.0), elapsed)
            watched = self.watched.get(place)
            if watched is None or watched.who != who:
                baseline = self._baseline(who, message, heard)
                fresh = Watched(
                    who, message, baseline, phase_began=heard, collective_at=self._clock
                )
                self._begin(place, fresh)
            elif (watched.message.sent, watched.message.step) != (message.sent, message.step):
                heard = max(heard, watched.baseline.heard)
                watched.baseline.record(
                    heard, message.step, message.phase, learn=place[0] not in unusual
                )
                if message.phase != watched.message.phase:
                    watched.phase_began = heard
                if message.thread != watched.message.thread:
                    watched.thread = None
                watched.message, watched.checks, watched.demands = message, (), ()
                watched.collective_at = self._clock
            else:  # its page was read while it wrote, or it waits in another collective
                if watched.message.collective != message.collective:
                    watched.collective_at = self._clock
                watched.message = message
        self._left = THREADS
        for place, watched in share_places(self.watched.items(), len(self.watched), self._claim):
            watched.unheard = 0 if place in present else watched.unheard + 1
            self._examine(place, watched)
        self._forget_ends()

    def jobs(self) -> dict[str, list[RankState]]:
        """Return the watched ranks of each job."""
        found: dict[str, list[RankState]] = defaultdict(list)
        for (job, _), watched in sorted(self.watched.items()):
            found[job].append(watched.at(self._clock))
        return dict(found)

    def _baseline(self, who: Identity, message: Message, heard: float) -> SilenceBaseline:
        """Return the baseline of a newly watched process: the saved one, if any."""
        saved = self._saved.pop(who.process.key, None)
        if saved is None:
            return SilenceBaseline.begin(heard, message.step, message.phase, self._floor)
        baseline = saved.baseline.moved(self._clock - saved.clock, self._floor)
        if saved.sent != message.sent:
            baseline.resume(heard, message.step, message.phase)
        return baseline

    def _begin(self, place: Place, watched: Watched) -> None:
        """Watch a rank's new process: the job goes on, so earlier ends are forgotten."""
        job, launcher = place[0], watched.who.process.launcher
        for other, before in list(self.watched.items()):
            goes_on = other[0] == job or (launcher and before.who.process.launcher == launcher)
            if other == place or (goes_on and before.end is not None):
                self._forget(other)
        self.watched[place] = watched
        self._exit_watcher.follow(*watched.key)

    def _examine(self, place: Place, watched: Watched) -> None:
        """Check the process of a watched rank."""
        if watched.end is not None:
            return
        watched.end = self._exit_watcher.end(*watched.key)
        if watched.end is not None:
            watched.state, watched.ended_at = ThreadState.GONE, self._clock
            return
        if watched.unheard > GRACE:  # it lives, but has closed its heartbeat
            self._forget(place)
            return
        # A process with a recent heartbeat is healthy, and is not checked each time.
        if self._count % SELDOM and watched.baseline.silence(self._clock) < FRESH:
            return
        if watched.thread is None:
            if watched.message.thread and not self._has_turn(watched):
                return
            watched.thread = thread_of(self._host, watched.key[0], watched.message.thread)
        try:
            found = activity(self._host, *watched.key, watched.thread)
        except (OSError, ValueError, ArithmeticError):
            found = None
        # A look at each thread, so only where it is soon to decide.
        if found and watched.suspected(self._clock) and self._has_turn(watched):
            wanted = demands(self._host, watched.key[0])
            watched.threads = len(wanted) or MAX_THREADS
            watched.demands = _added(watched.demands, wanted, self._clock)
        is_due = watched.baseline.silence(self._clock) + WINDOW > watched.baseline.idle_bound
        marked = watched.message.phase in SHOWN
        if not (is_due and marked):
            watched.may_store = False
        elif self._count % SELDOM == 0 or watched.may_store:
            watched.may_store = not self._has_turn(watched)
            if not watched.may_store and waits_for_storage(self._host, watched.key[0]):
                watched.stored_at = self._clock
        before, watched.state = watched.state, found.state if found else ThreadState.UNKNOWN
        if watched.state not in STOPPED:
            if found and watched.stopped_at is not None:
                # Unless a tool only read its stack, it has the usual time for its next step.
                stopped_for = self._clock - watched.stopped_at
                if before is ThreadState.STOPPED or stopped_for > self._floor:
                    last = watched.message
                    watched.baseline.resume(self._clock, last.step, last.phase)
            watched.stopped_at = None
        elif watched.stopped_at is None:  # since its last look or heartbeat: stopped, it sends none
            recent = max(watched.baseline.heard, self._clock - FRESH)
            watched.stopped_at = watched.checks[-1][1] if watched.checks else recent
        if found is None:
            watched.checks = ()
            return
        watched.checks = _added(watched.checks, found, self._clock)

    def _claim(self, entry: tuple[Place, Watched]) -> Claim:
        (job, _), watched = entry
        waits = watched.suspected(self._clock)
        return watched.who.process.user, job, watched.turn if waits else math.inf

    def _has_turn(self, watched: Watched) -> bool:
        """Return whether the threads of a rank may be looked at in this check, and count them."""
        if self._left <= 0:
            return False
        self._left -= watched.threads
        watched.turn = self._clock
        return True

    def _forget_ends(self) -> None:
        """Forget the ends of each job that are too old, and those beyond `MAX_SENDERS`.

        Creating such processes costs a user nothing, and what is kept of each includes its
        environment, which may be 252 KiB.

        Users take turns, then jobs, the latest first.
        """
        ended = [entry for entry in self.watched.items() if entry[1].end is not None]
        latest: dict[str, float] = {}
        for (job, _), watched in ended:
            latest[job] = max(watched.ended_at, latest.get(job, 0.0))
        waiting = {
            job
            for (job, _), watched in self.watched.items()
            if watched.end is None and watched.baseline.silence(self._clock) > WAITING
        }
        known = {job for job, at in latest.items() if self._clock - at <= KEPT or job in waiting}
        kept = share_places(
            [entry for entry in ended if entry[0][0] in known],
            MAX_SENDERS,
            lambda entry: (entry[1].who.process.user, entry[0][0], -entry[1].ended_at),
        )
        for place in {place for place, _ in ended} - {place for place, _ in kept}:
            self._forget(place)

    def _forget(self, place: Place) -> None:
        self._exit_watcher.forget(*self.watched.pop(place).key)


def _added(before: tuple[tuple[T, float], ...], found: T, at: float) -> tuple[tuple[T, float], ...]:
    """Return what `Watched.checks` has after one more look."""
    now = found, at
    first, middle, *_ = before or (now, now)
    if at - middle[1] > WINDOW:
        first, middle = middle, now
    return first, middle, now


def _passed(looks: tuple[tuple[object, float], ...]) -> float:
    """Return the seconds from the first look to the last."""
    return looks[-1][1] - looks[0][1] if looks else 0.0
