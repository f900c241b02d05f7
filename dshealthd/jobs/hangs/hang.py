"""The hang of a job on this node: whether it is hung, the class of the hang, and the culprit.

A job is hung on a node if each of its ranks there has been silent for longer than is usual for
it. Most of them wait for another rank, which may be on another node. Then the culprit is not here,
and only the Prometheus rules, which see all nodes, can name it.

What a process is doing is evidence against its rank. How far a rank is only becomes evidence in
comparison with all ranks of the job: a node that sees some of them, or as many ahead as behind,
names none.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from dshealthd.jobs.hangs.activity import ThreadState
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.silence import UNKNOWN
from dshealthd.training.message import Phase, StepStage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUSY = 0.5
"""Share of a core's time from which a rank without a GPU counts as computing.

A rank that waits for others in gloo sleeps.
"""
PATIENCE = 5.0
"""Factor on the silence bound of a rank that computes: it may be in an unmarked pause that has not
occurred before.
"""


class HangClass(enum.StrEnum):
    """The cause of a hang, as this node sees it."""

    NONE = "none"
    """The job is not hung."""
    PROCESS = "process"
    """A rank's process is stopped, or has ended while the others wait for it."""
    CHECKPOINT = "checkpoint"
    """A rank does not return from a checkpoint."""
    INPUT = "input"
    """A rank does not begin the step that the others are in, or hangs in I/O."""
    DESYNC = "desync"
    """Ranks are at different points of the training, and none of them moves."""
    WAITING = "waiting"
    """No cause on this node: the ranks wait for a rank elsewhere, or for the network."""


UNEXPLAINED = 90.0
"""Seconds that a hang without a cause on this node must be overdue before it is shown: the time
that probes have to find one. The rules wait as long
(`dshealthd:threshold:hang_unexplained_seconds`).
"""
BETWEEN_STEPS = 600.0
"""The same while all ranks here are between the same two steps, where a training may write an
unmarked checkpoint (`dshealthd:threshold:hang_between_steps_seconds`).
"""


class Culprit(enum.StrEnum):
    """The problem of the rank that the others wait for."""

    STOPPED = "stopped"
    """It is stopped by a signal (SIGSTOP) or a debugger."""
    GONE = "gone"
    """Its process has ended."""
    BLOCKED = "blocked"
    """It is in uninterruptible sleep in the kernel: storage or a driver."""
    CHECKPOINT = "checkpoint"
    PAUSED = "paused"
    """It does not return from a phase that it has marked, other than a checkpoint."""
    INPUT = "input"
    """It has not begun the step that the others are in: it may wait for data, or be at anything else
    that a training does between two steps.
    """
    LAGGING = "behind"
    AHEAD = "ahead"
    """It is ahead of the others: it has skipped the operation in which they wait."""


PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        Culprit.STOPPED: "is stopped (SIGSTOP, or a debugger)",
        Culprit.GONE: "has ended",
        Culprit.BLOCKED: "hangs in kernel I/O",
        Culprit.CHECKPOINT: "does not return from a checkpoint",
        Culprit.PAUSED: "is in a pause that the others are not in",
        Culprit.INPUT: "has not begun its next step (data, logging, a barrier, or the like)",
        Culprit.LAGGING: "is behind the others",
        Culprit.AHEAD: "is ahead: it skipped a collective that the others wait in",
    }
)
"""The problem of a culprit as every page, command and file words it, after its rank."""


def explain(cause: str, *, named: bool, whole: bool) -> str:
    """Return the class of a hang in words.

    `named` says whether a culprit is known, `whole` whether all ranks of the job are on this node.
    """
    match cause:
        case HangClass.PROCESS:
            return "a rank's process is stopped or has ended"
        case HangClass.CHECKPOINT:
            return "a checkpoint"
        case HangClass.INPUT:
            return "work between steps, or I/O, of a rank"
        case HangClass.DESYNC if named:
            return "ranks are at different places"
        case HangClass.DESYNC if whole:
            return "ranks are at different places, as many ahead as behind, so none is named"
        case HangClass.DESYNC:
            return (
                "ranks here are at different places; ranks on other nodes are not seen from this "
                "node, so none is named"
            )
        case HangClass.WAITING if whole:
            return "unknown: all ranks wait at the same place"
        case HangClass.WAITING:
            return (
                "not on this node: its ranks wait at the same place for a rank on another node, "
                "or for the network"
            )
    return cause


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank of this node at one moment."""

    rank: int
    pid: int
    start: int
    """Clock ticks from boot to its start; this and the pid identify a process uniquely."""
    step: int
    """Steps it has made."""
    phase: Phase
    stage: StepStage
    """How far it is in the next step."""
    silence: float
    """Seconds since its last heartbeat."""
    bound: float
    """Seconds of silence that are usual for it."""
    state: ThreadState
    """State of its process."""
    ended: ExitKind | None = None
    """How its process ended; None while it runs."""
    ended_at: float | None = None
    """Unix time in seconds at which its end was noticed."""
    settled: bool = True
    """Whether it has made more than its first steps since its first heartbeat."""
    user: int | None = None
    """Its real uid; None if unknown."""
    world_size: int | None = None
    """Ranks of the job, according to its environment; None if unknown."""
    cpu: float | None = None
    """Share of a core's time that its process used, or was ready to use, since its last heartbeat.

    None if unknown, or if it uses a GPU, where waiting takes CPU time too.
    """

    @property
    def stands_still(self) -> bool:
        """Whether the rank has been silent for longer than is usual."""
        bound = self.bound * (PATIENCE if self.cpu is not None and self.cpu >= BUSY else 1.0)
        return self.silence > bound

    @property
    def stopped(self) -> bool:
        """Whether the rank's process is stopped by a signal or a debugger."""
        return self.state in {ThreadState.STOPPED, ThreadState.TRACED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A job that is hung on this node."""

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
    hold: float = 0.0
    """Seconds that it must be overdue before it is shown as a hang: it may be a pause."""

    @property
    def may_be_pause(self) -> bool:
        """Whether the ranks may be in an unmarked pause between two steps."""
        return self.hold == BETWEEN_STEPS and self.overdue < self.hold

    @property
    def explanation(self) -> str:
        """The cause in words."""
        return explain(self.reason, named=bool(self.culprits), whole=self.whole)


def judge(job: str, ranks: Sequence[RankState], now: float) -> Hang | None:
    """Return the hang of a job at Unix time `now`; None if it moves, or has ended or ends here."""
    living = [rank for rank in ranks if rank.ended is None]
    if not living or not all(rank.stands_still for rank in living):
        return None
    done = any(rank.ended is ExitKind.ENDED for rank in ranks)
    # After one rank has finished, another may still have to write results.
    if done and any(rank.silence < UNKNOWN for rank in living):
        return None
    whole = _whole(ranks)
    reason, culprits = _cause(ranks, living, whole=whole)
    return Hang(
        job=job,
        reason=reason,
        culprits=tuple(culprits),
        ranks=tuple(ranks),
        # The job went on until the last of them fell silent.
        since=now - min(rank.silence for rank in living),
        whole=whole,
        overdue=min(rank.silence - rank.bound for rank in living),
        hold=_hold(reason, living),
    )


def _whole(ranks: Sequence[RankState]) -> bool:
    """Return whether these are all ranks of their job."""
    sizes = {rank.world_size for rank in ranks}
    return None not in sizes and len({rank.rank for rank in ranks}) >= max(
        size for size in sizes if size is not None
    )


def _hold(reason: HangClass, living: Sequence[RankState]) -> float:
    """Return how long a hang must be overdue; ranks of the class `waiting` are at one place."""
    if reason is not HangClass.WAITING:
        return 0.0
    between = all(rank.phase is Phase.TRAINING and rank.stage is StepStage.INPUT for rank in living)
    return BETWEEN_STEPS if between else UNEXPLAINED


def _cause(
    ranks: Sequence[RankState], living: Sequence[RankState], *, whole: bool
) -> tuple[HangClass, list[tuple[int, Culprit]]]:
    # The most certain first: the kernel's view of a process, then what a rank has marked itself,
    # and only then how far each rank is, which has to be compared.
    process = [(rank.rank, Culprit.GONE) for rank in ranks if rank.ended is not None]
    process += [(rank.rank, Culprit.STOPPED) for rank in living if rank.stopped]
    if process:
        return HangClass.PROCESS, process
    # Not only a minority: all ranks of a node may hang in the same storage at once.
    if saving := [rank.rank for rank in living if rank.phase is Phase.CHECKPOINT]:
        return HangClass.CHECKPOINT, [(rank, Culprit.CHECKPOINT) for rank in saving]
    blocked = [rank.rank for rank in living if rank.state is ThreadState.BLOCKED]
    if 0 < len(blocked) * 2 <= len(living):
        return HangClass.INPUT, [(rank, Culprit.BLOCKED) for rank in blocked]
    paused = [rank.rank for rank in living if rank.phase is not Phase.TRAINING]
    if 0 < len(paused) < len(living):
        if not whole or len(paused) * 2 == len(living):
            return HangClass.DESYNC, []
        if len(paused) * 2 < len(living):
            return HangClass.DESYNC, [(rank, Culprit.PAUSED) for rank in paused]
    return _apart(living, whole=whole)


def position(rank: RankState) -> tuple[int, int]:
    """Return how far a rank is: its steps, and its stage in the next one, 0 if unknown."""
    return rank.step, rank.stage


def _apart(
    ranks: Sequence[RankState], *, whole: bool
) -> tuple[HangClass, list[tuple[int, Culprit]]]:
    """Compare how far the ranks are: the culprits are those behind if most are further, and those
    furthest ahead if most are behind. No rank is named if these are not all ranks of the job.
    """
    known = all(rank.stage is not StepStage.UNKNOWN for rank in ranks)
    places = {rank.rank: position(rank) if known else (rank.step, 0) for rank in ranks}
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
    behind = [rank for rank, place in places.items() if place == last]
    if last[1] == StepStage.INPUT:
        return HangClass.INPUT, [(rank, Culprit.INPUT) for rank in behind]
    return HangClass.DESYNC, [(rank, Culprit.LAGGING) for rank in behind]
