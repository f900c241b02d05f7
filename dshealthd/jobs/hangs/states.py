"""The state of a rank at one moment, and what else shows whether its job is at work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from dshealthd.jobs.environment import TIMEOUT
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.linux.activity import BUSY, IDLE_SHARE, ThreadState
from dshealthd.training.message import GROUP_BIT, Phase, StepStage

STAGES = 3
"""Stages of a step."""
SUSPECTED = 0.5
"""Share of the bound from which on a silence is suspected, and looked at closely. A healthy rank is
seldom silent for so long: its bound is twice the longest of the last hours.
"""
STOPPED = frozenset({ThreadState.STOPPED, ThreadState.TRACED})
"""States of a process that is stopped by a signal or a debugger."""
OPERATIONS = (
    *("broadcast", "all_reduce", "all_reduce", "reduce", "all_gather", "all_gather", "all_gather"),
    *("gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all", "send", "recv", "recv"),
    *("barrier", "reduce_scatter", "coalesced", "all_reduce", "reduce_scatter"),
)
"""The names of c10d's types of operations, in the order of its `OpType`."""


def operation(word: int) -> str:
    """Return the collective in a heartbeat's word of a wait, with its group if that is told; empty
    for none.
    """
    group, kind = divmod(word, 1 << GROUP_BIT)
    if not kind:
        return ""
    name = OPERATIONS[kind - 1] if kind <= len(OPERATIONS) else "other"
    return f"{name} in group {group}" if group else name


class Work(NamedTuple):
    """What else than its ranks' threads shows whether a silent job is at work."""

    says: str = ""
    """What works, in words; empty if nothing is seen to."""
    computes: bool = False
    """Whether child processes of its ranks compute, as compilers and data loaders do."""
    still: frozenset[int] = frozenset()
    """Ranks whose GPU is known not to compute."""
    waits: frozenset[int] = frozenset()
    """Those of them whose GPU waits in a kernel: their step has not ended."""
    awaits: Mapping[int, str] = MappingProxyType({})
    """Ranks that wait for an answer from outside the job, as of a service that generates rollouts,
    and whose: nobody sees whether it works.
    """


NO_WORK = Work()


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
    forward_pass: int = 0
    """Forward passes that the next step has begun so far."""
    forward_passes: int = 0
    """How many a step has, several where gradients accumulate; 0 if unknown."""
    silence: float
    """Seconds since its last heartbeat."""
    bound: float
    """Seconds of silence that are usual for it."""
    idle_bound: float = math.inf
    """Those that are usual while none of its job is at work here, if these are fewer."""
    stores: bool = False
    """Whether one of its threads has waited for storage of late, in a marked phase."""
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
    """Share of a core's time that its process used, or was ready to use, since its last heartbeat;
    None if unknown.
    """
    thread_cpu: float | None = None
    """Share that its training's thread used; None if unknown."""
    on_gpu: bool = False
    """Whether it trains on a GPU, for which its host may spin."""
    timeout: int = TIMEOUT
    """Seconds after which a watchdog of its own ends it if it hangs."""
    stopped_for: float = 0.0
    """Seconds for which its process has been seen stopped, by a signal or a debugger."""
    phase_seconds: float = 0.0
    """Seconds for which it has been in its phase."""
    collective: str = ""
    """The collective in which its host is between two steps; empty if it is known of none."""
    collective_for: float = 0.0
    """Seconds for which it has been seen there."""

    @property
    def overdue(self) -> bool:
        """Whether the rank has been silent for longer than is usual."""
        return self.silence > self.bound

    @property
    def stopped(self) -> bool:
        """Whether the rank's process is stopped by a signal or a debugger."""
        return self.state in STOPPED

    def computes(self, seen: Work) -> bool:
        """Whether its CPU time shows that it is at work: not where its host may spin for its
        GPU.
        """
        spins = self.rank in seen.waits or (self.on_gpu and self.rank not in seen.still)
        return not spins and self.cpu is not None and self.cpu >= BUSY

    def is_idle(self, seen: Work) -> bool:
        """Whether the rank is known to be idle, as its GPU and its training's thread are."""
        if self.on_gpu and self.rank not in seen.still:
            return False
        return self.rank in seen.waits or (
            self.thread_cpu is not None and self.thread_cpu < IDLE_SHARE and not self.computes(seen)
        )

    def waits_in(self, seen: Work, floor: float) -> str:
        """Return in what the rank waits for others; empty if it is not known to."""
        if not self.is_idle(seen):
            return ""
        if self.stage in {StepStage.FORWARD, StepStage.BACKWARD}:
            return "step" if self.phase is Phase.TRAINING else ""
        if self.rank in seen.waits:
            return "kernel"
        return self.collective if self.collective_for > floor else ""


def position(rank: RankState) -> float:
    """Return how far a rank is, in steps: a third of the next one is over in its last forward pass,
    and two thirds in its last backward pass; what comes before them shares the first third.

    Whole steps where its stage is unknown.
    """
    if rank.stage is StepStage.UNKNOWN:
        return rank.step
    stage = (rank.stage - StepStage.INPUT) / STAGES
    last = rank.forward_passes
    number = min(rank.forward_pass + (rank.stage is StepStage.INPUT), last)
    if number < last or (last and rank.stage is StepStage.INPUT):
        return rank.step + (max(number, 1) - 1 + stage) / last / STAGES
    return rank.step + stage
