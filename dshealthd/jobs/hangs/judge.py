"""A job's standstill on this node: whether it is a hang or a pause, its class, and the culprit.

A job stands still on a node if each of its ranks there has been silent for longer than is usual
for it, or for a moment beside a rank that is stopped or has ended while they wait, which no pause
explains. Most of them wait for another rank, which may be on another node. Then the culprit is not
here, and only the Prometheus rules, which see all nodes, can name it.

What a rank does decides, not how long it may take: it is *at work* if its GPU, its files, its
sockets or its CPU time show it; it *waits* for others if it is idle in a step, in a collective or
in a kernel that moves no data; it is *idle* if its training's thread takes no CPU time, and it is
none of these. A standstill is no hang while a rank is at work or somebody has stopped the job on
purpose, and patience is only for ranks of which nothing is known: a marked checkpoint is a pause
while somebody works.

What a process is doing is evidence against its rank. How far a rank is only becomes evidence in
comparison with all ranks of the job: a node that sees some of them, or as many ahead as behind,
names none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dshealthd.jobs.hangs.classes import HANGS, Culprit, HangClass
from dshealthd.jobs.hangs.exits import FAILURES
from dshealthd.jobs.hangs.silence import FLOOR, UNKNOWN
from dshealthd.jobs.hangs.states import NO_WORK, RankState, Work, position
from dshealthd.linux.activity import ThreadState
from dshealthd.linux.socket_waits import TERMINAL
from dshealthd.training.message import Phase, StepStage

IDLE_FOR = 45.0
"""Seconds for which a rank must have been idle before it counts as the one that others, which wait
in a collective, wait for. It is to be paged within 90 s: of these, 10 s are the rule's own, 15 s a
scrape, and some 15 s two checks, the evaluation of rules and Alertmanager's wait.
"""
UNEXPLAINED = 90.0
"""Seconds that a hang without a cause on this node must be overdue before it is shown: the time
that probes have to find one, unless its watchdog ends it sooner. The rules wait as long
(`dshealthd:threshold:hang_unexplained_seconds`).
"""
PATIENCE = 600.0
"""Most seconds of silence for ranks of which nothing is known, or of which only CPUs compute, as a
loop that never ends does.
"""
NOTICE = 60.0
"""Seconds before that for which a hang must be shown: the job and what it was at are there no
more.
"""
MAX_NAMED = 8
"""Most culprits named of a job."""
_BY_PLACE = frozenset({Culprit.INPUT, Culprit.LAGGING, Culprit.AHEAD})
"""Problems that only a comparison of how far ranks are shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A job whose ranks on this node all stand still: a hang or a pause."""

    job: str
    reason: HangClass
    culprits: tuple[tuple[int, Culprit], ...]
    """Ranks of this node that the others wait for, with their problems; empty if unknown here."""
    ranks: tuple[RankState, ...]
    """All its ranks on this node, including those that have ended."""
    since: float
    """Unix time in seconds of the last heartbeat that any of them sent."""
    whole: bool = False
    """Whether all ranks of the job are on this node."""
    overdue: float = 0.0
    """Seconds by which the silence of each living rank exceeds the usual, at least."""
    waiting: Mapping[int, str] = field(default_factory=dict)
    """In what each of its ranks here waits for others, as far as they are known to."""
    hold: float = 0.0
    """Seconds that it must be overdue before it is shown as a hang; infinite for a pause that may
    last for ever.
    """
    patience: float = PATIENCE
    """The same at most, whatever is not known: less than until the job's own watchdog ends it."""
    work: Work = NO_WORK
    """What showed whether the job is at work."""

    @property
    def is_pause(self) -> bool:
        """Whether the standstill is no hang."""
        return self.reason not in HANGS

    @property
    def teaches(self) -> bool:
        """Whether such a silence, once over, is usual from then on.

        Not that of a pause, which is recognized by itself, and not that of a stopped process.
        """
        unseen = self.reason in {HangClass.IDLE, HangClass.COLLECTIVE}
        return unseen or (not self.is_pause and self.reason is not HangClass.PROCESS)

    @property
    def shown(self) -> bool:
        """Whether this node shows the standstill as a hang."""
        return not self.is_pause and self.overdue >= self.hold

    @property
    def silence(self) -> float:
        """Seconds since the last heartbeat that any of its living ranks sent."""
        return min((rank.silence for rank in self.ranks if rank.ended is None), default=0.0)

    @property
    def explanation(self) -> str:
        """The cause of the standstill in words."""
        if self.reason is HangClass.WORKING and self.work.says:
            return f"no step, but {self.work.says}"
        if self.reason is HangClass.WAITING and all(
            rank.stage is StepStage.INPUT and not rank.collective and rank.rank not in self.waiting
            for rank in self.ranks
            if rank.ended is None
        ):
            return "its ranks here are between two steps, and in no collective"
        if self.reason is HangClass.DESYNC and not self.culprits:
            return (
                "ranks are at different places, as many ahead as behind, so none is named"
                if self.whole
                else "ranks here are at different places; ranks on other nodes are not seen from "
                "this node, so none is named"
            )
        if self.whole and self.reason is HangClass.WAITING:
            return "unknown: all ranks wait at the same place"
        if self.whole and self.reason is HangClass.SUSPENDED:
            return "suspended: all its processes are stopped"
        return self.reason.words


def judge(
    job: str,
    ranks: Sequence[RankState],
    now: float,
    work: Callable[[], Work] = lambda: NO_WORK,
    floor: float = FLOOR,
) -> Standstill | None:
    """Return the standstill of a job at Unix time `now`; None if it moves, or has ended or ends
    here.

    `work` is asked for the job's GPUs, files and sockets only if its ranks stand still. `floor` is
    the silence in seconds that is usual in any job.
    """
    living = [rank for rank in ranks if rank.ended is None]
    ended = [rank for rank in ranks if rank.ended is not None]
    late = all(rank.overdue for rank in living)
    still = all(rank.silence > min(rank.bound, rank.idle_bound) for rank in living)
    gone = [rank for rank in ended if rank.ended in FAILURES]
    stopped = any(rank.stopped_for > floor for rank in living)
    quiet = living and all(rank.silence > floor for rank in living)
    if not quiet or not (still or stopped or ended):
        return None
    seen = work()
    waiting = {rank.rank: where for rank in living if (where := rank.waits_in(seen, floor))}
    since = [rank for rank in ended if now - (rank.ended_at or 0.0) > floor]
    # A rank that did not fail is done, unless others have waited since: they may write results, or
    # a checkpoint before a preemption.
    if not gone and len(waiting) == len(living) and not seen.says:
        gone = since
    certain = stopped or any(rank in since and rank.ended_at for rank in gone)
    whole = _whole(ranks)
    marked = still and not late and _nobody_works(living, waiting, seen)
    if marked:  # what a node may say by itself, it says as late as if somebody worked
        idle = [replace(rank, bound=min(rank.bound, rank.idle_bound)) for rank in living]
        patience = max(rank.bound - one.bound for rank, one in zip(living, idle, strict=True))
        living = idle
    else:
        patience = _patience(living, waiting, seen)
    if not (certain or late or marked):
        return None
    overdue = min(rank.silence - (floor if certain else rank.bound) for rank in living)
    computes = seen.computes or any(rank.computes(seen) for rank in living)
    if ended and not gone:
        # Those that are done are not waited for by one that computes, as it exports the model.
        if overdue < patience or seen.says or computes:
            return None
        gone = ended
    reason, culprits = _cause(living, gone, waiting, seen, floor, whole=whole)
    if reason in {HangClass.SUSPENDED, HangClass.DEBUGGER}:
        hold = math.inf
    elif reason is HangClass.PROCESS:
        hold = 0.0
    elif seen.says:
        reason, hold = HangClass.WORKING, math.inf
    elif overdue < patience and computes:
        reason, hold = HangClass.WORKING, patience
    elif overdue < patience and not all(rank.settled or rank.is_idle(seen) for rank in living):
        reason, hold = HangClass.STARTING, patience
    elif (
        overdue < patience
        and {problem for _, problem in culprits} <= _BY_PLACE
        and _awaits(living, waiting, seen)
    ):
        reason, hold, culprits = HangClass.BETWEEN_STEPS, patience, []
    elif (
        overdue < patience
        and (marked or reason is HangClass.WAITING)
        and all(
            (marked or rank.phase is Phase.TRAINING) and rank.stage is StepStage.INPUT
            for rank in living
        )
    ):
        reason, hold, culprits = _between_steps(
            living, waiting, seen, patience, whole=whole, marked=marked
        )
    else:
        hold = min(UNEXPLAINED, patience) if reason is HangClass.WAITING else 0.0
    return Standstill(
        job=job,
        reason=reason,
        culprits=tuple(culprits[:MAX_NAMED]),
        ranks=tuple(ranks),
        # The job went on until the last of them fell silent.
        since=now - min(rank.silence for rank in living),
        whole=whole,
        overdue=overdue,
        waiting=waiting,
        hold=hold,
        patience=patience,
        work=seen,
    )


def _nobody_works(living: Sequence[RankState], waiting: Mapping[int, str], seen: Work) -> bool:
    """Return whether nothing shows that a rank here is at work in its marked phase."""
    return not (seen.says or seen.computes) and all(
        rank.is_idle(seen)
        and rank.state is ThreadState.SLEEPING
        and not rank.stores
        and rank.rank not in seen.awaits
        and (rank.rank in waiting or rank.stage is StepStage.INPUT)
        for rank in living
    )


def _patience(living: Sequence[RankState], waiting: Mapping[int, str], seen: Work) -> float:
    """Return the seconds that ranks may be overdue while nothing shows that they hang: less than
    until the job's own watchdog ends it, but for a start that compiles while nobody waits. One that
    would end it within its usual silence does not watch it.
    """
    compiles = seen.computes or any(rank.computes(seen) for rank in living)
    most = min(PATIENCE, *(rank.timeout - NOTICE for rank in living))
    if compiles and not waiting and not all(rank.settled for rank in living):
        most = UNKNOWN
    left = most - max(rank.bound for rank in living)
    return left if left > 0 else UNEXPLAINED


def _whole(ranks: Sequence[RankState]) -> bool:
    """Return whether these are all ranks of their job."""
    sizes = [math.inf if rank.world_size is None else rank.world_size for rank in ranks]
    return len({rank.rank for rank in ranks}) >= max(sizes)


def _between_steps(
    living: Sequence[RankState],
    waiting: Mapping[int, str],
    seen: Work,
    patience: float,
    *,
    whole: bool,
    marked: bool,
) -> tuple[HangClass, float, list[tuple[int, Culprit]]]:
    """Return the class of a standstill between the same two steps, its hold, and the ranks that the
    others wait for: those that are idle, or wait in another collective than most.

    If these are all ranks of the job, none is left that could write a checkpoint or evaluate.
    """
    rest = [rank for rank in living if rank.rank not in waiting]
    if any(
        rank.rank in seen.awaits
        or rank.collective
        or not rank.is_idle(seen)
        or rank.silence <= IDLE_FOR
        for rank in rest
    ):
        return HangClass.BETWEEN_STEPS, patience, []
    if not waiting:
        return HangClass.IDLE, patience, []
    if not whole and (rest or marked or "kernel" not in waiting.values()):
        return HangClass.COLLECTIVE, patience, []
    if rest:
        reason, culprit = HangClass.INPUT, Culprit.INPUT
        if any(rank.phase is Phase.CHECKPOINT for rank in rest):
            reason, culprit = HangClass.CHECKPOINT, Culprit.CHECKPOINT
        named = [(rank.rank, culprit) for rank in rest]
        return reason, 0.0, named if len(rest) <= len(waiting) else []
    counts = Counter(waiting.values())
    most, count = counts.most_common(1)[0]
    if count == len(living) or "kernel" in counts:
        return HangClass.WAITING, min(UNEXPLAINED, patience), []
    apart = [(rank, Culprit.APART) for rank, operation in waiting.items() if operation != most]
    return HangClass.DESYNC, 0.0, apart if count * 2 > len(living) else []


def _awaits(living: Sequence[RankState], waiting: Mapping[int, str], seen: Work) -> bool:
    """Return whether those ranks that are behind, and wait for none of the job's, are between two
    steps and wait for an answer from outside it, as for rollouts.
    """
    places = _places(living)
    last = min(places.values())
    behind = [rank for rank in living if places[rank.rank] == last and rank.rank not in waiting]
    return bool(behind) and all(
        rank.rank in seen.awaits
        and rank.phase is Phase.TRAINING
        and rank.stage in {StepStage.UNKNOWN, StepStage.INPUT}
        for rank in behind
    )


def _cause(
    living: Sequence[RankState],
    ended: Sequence[RankState],
    waiting: Mapping[int, str],
    seen: Work,
    floor: float,
    *,
    whole: bool,
) -> tuple[HangClass, list[tuple[int, Culprit]]]:
    # The most certain first: the kernel's view of a process, then what a rank has marked itself,
    # and only then how far each rank is, which has to be compared.
    gone = [(rank.rank, Culprit.GONE) for rank in ended]
    stopped = [(rank.rank, Culprit.STOPPED) for rank in living if rank.state is ThreadState.STOPPED]
    if stopped and len(stopped) == len(living) and not gone:
        return HangClass.SUSPENDED, stopped
    # Not for a moment: a job's processes are suspended one after another, and tools that read
    # stacks, as evidence does, trace a process as well.
    held = {rank.rank: rank.state for rank in living if rank.stopped_for > floor}
    stopped = [(rank, problem) for rank, problem in stopped if rank in held]
    if gone or stopped:
        return HangClass.PROCESS, gone + stopped
    if traced := [rank for rank, state in held.items() if state is ThreadState.TRACED]:
        return HangClass.DEBUGGER, [(rank, Culprit.TRACED) for rank in traced]
    if asked := [rank.rank for rank in living if seen.awaits.get(rank.rank) == TERMINAL]:
        return HangClass.DEBUGGER, [(rank, Culprit.PROMPT) for rank in asked]
    # Not only a minority: all ranks of a node may hang in the same storage at once. Those that wait
    # for others have written what they had to.
    if saving := [
        rank.rank for rank in living if rank.phase is Phase.CHECKPOINT and rank.rank not in waiting
    ]:
        return HangClass.CHECKPOINT, [(rank, Culprit.CHECKPOINT) for rank in saving]
    blocked = [rank.rank for rank in living if rank.state is ThreadState.BLOCKED]
    if 0 < len(blocked) * 2 <= len(living) or len(blocked) == len(living):
        return HangClass.INPUT, [(rank, Culprit.BLOCKED) for rank in blocked]
    paused = [rank.rank for rank in living if rank.phase is not Phase.TRAINING]
    if 0 < len(paused) < len(living):
        if not whole or len(paused) * 2 == len(living):
            return HangClass.DESYNC, []
        if len(paused) * 2 < len(living):
            return HangClass.DESYNC, [(rank, Culprit.PAUSED) for rank in paused]
    reason, apart = _apart(living, whole=whole)
    if just := [rank for rank in living if rank.state is ThreadState.STOPPED]:
        # What the others wait for may be its stop, so how far they are accuses none of them.
        apart = [(rank, problem) for rank, problem in apart if rank in {one.rank for one in just}]
    return reason, apart


def _apart(
    ranks: Sequence[RankState], *, whole: bool
) -> tuple[HangClass, list[tuple[int, Culprit]]]:
    """Compare how far the ranks are: the culprits are those behind if most are further, and those
    furthest ahead if most are behind. No rank is named if these are not all ranks of the job.
    """
    places = _places(ranks)
    counts = Counter(places.values())
    last, first = min(counts), max(counts)
    if last == first:
        return HangClass.WAITING, []
    if not whole or counts[last] * 2 == len(ranks):
        return HangClass.DESYNC, []
    if counts[last] * 2 > len(ranks):
        return HangClass.DESYNC, [
            (rank, Culprit.AHEAD) for rank, place in places.items() if place == first
        ]
    behind = [rank for rank in ranks if places[rank.rank] == last]
    known = all(rank.stage is not StepStage.UNKNOWN for rank in ranks)
    if known and behind[0].stage is StepStage.INPUT:
        return HangClass.INPUT, [(rank.rank, Culprit.INPUT) for rank in behind]
    return HangClass.DESYNC, [(rank.rank, Culprit.LAGGING) for rank in behind]


def _places(ranks: Sequence[RankState]) -> dict[int, float]:
    """Return how far each rank is, as far as it can be compared with the others."""
    known = all(rank.stage is not StepStage.UNKNOWN for rank in ranks)
    if len({rank.forward_passes for rank in ranks}) > 1:  # then their numbers say nothing
        ranks = [replace(rank, forward_passes=0) for rank in ranks]
    return {rank.rank: position(rank) if known else rank.step for rank in ranks}
