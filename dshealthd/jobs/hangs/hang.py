"""The hang of a job on this node: whether it is hung, the class of the hang, and the culprit.

A job is hung on a node if each of its ranks there has been silent for longer than is usual for
it. Most of them wait for another rank, which may be on another node. Then the culprit is not here,
and only the Prometheus rules, which see all nodes, can name it.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.jobs.hangs.activity import ThreadState
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.silence import UNKNOWN
from dshealthd.training.message import Phase, StepStage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    """A rank does not get its next batch, or hangs in I/O, while the others are in the step."""
    DESYNC = "desync"
    """Ranks are at different points of the training, and none of them moves."""
    WAITING = "waiting"
    """No cause on this node: the ranks wait for a rank elsewhere, or for the network."""


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
    """It has not begun the step that the others are in."""
    LAGGING = "behind"
    AHEAD = "ahead"
    """It is ahead of the others: it has skipped the operation in which they wait."""


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


def judge(job: str, ranks: Sequence[RankState], now: float) -> Hang | None:
    """Return the hang of a job at Unix time `now`; None if it moves, or has ended or ends here."""
    living = [rank for rank in ranks if rank.ended is None]
    if not living or not all(rank.stands_still for rank in living):
        return None
    done = any(rank.ended is ExitKind.ENDED for rank in ranks)
    # After one rank has finished, another may still have to write results.
    if done and any(rank.silence < UNKNOWN for rank in living):
        return None
    reason, culprits = _cause(ranks, living)
    # The job went on until the last of them fell silent.
    since = now - min(rank.silence for rank in living)
    return Hang(job=job, reason=reason, culprits=tuple(culprits), ranks=tuple(ranks), since=since)


def _cause(
    ranks: Sequence[RankState], living: Sequence[RankState]
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
    if blocked := _minority(
        living, [rank.rank for rank in living if rank.state is ThreadState.BLOCKED]
    ):
        return HangClass.INPUT, [(rank, Culprit.BLOCKED) for rank in blocked]
    if paused := _minority(
        living, [rank.rank for rank in living if rank.phase is not Phase.TRAINING]
    ):
        return HangClass.DESYNC, [(rank, Culprit.PAUSED) for rank in paused]
    return _apart(living)


def _minority(living: Sequence[RankState], ranks: list[int]) -> list[int]:
    """Return `ranks` if they are at most half of the living ones, otherwise none."""
    return ranks if len(ranks) * 2 <= len(living) else []


def position(rank: RankState) -> tuple[int, int]:
    """Return how far a rank is: its steps, and its stage in the next one, 0 if unknown."""
    return rank.step, rank.stage


def _apart(living: Iterable[RankState]) -> tuple[HangClass, list[tuple[int, Culprit]]]:
    """Compare how far the ranks are: the lagging ones are the culprits if they are at most half,
    otherwise the ones ahead.
    """
    ranks = list(living)
    known = all(rank.stage is not StepStage.UNKNOWN for rank in ranks)
    places = {rank.rank: position(rank) if known else (rank.step, 0) for rank in ranks}
    counts = Counter(places.values())
    last, first = min(counts), max(counts)
    if last == first:
        return HangClass.WAITING, []
    behind = counts[last] * 2 <= len(ranks)
    at_fault = last if behind else first
    culprits = [rank for rank, place in places.items() if place == at_fault]
    if not behind:
        return HangClass.DESYNC, [(rank, Culprit.AHEAD) for rank in culprits]
    if last[1] == StepStage.INPUT:
        return HangClass.INPUT, [(rank, Culprit.INPUT) for rank in culprits]
    return HangClass.DESYNC, [(rank, Culprit.LAGGING) for rank in culprits]
