"""What a collection of evidence is about, and what it has found of each rank.

Plain values that travel as JSON between the agent and the collecting process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCase:
    """Why evidence is taken, and what is known before it is."""

    job: str
    """Empty for all jobs of the node."""
    reason: str
    """The class of the hang, such as `desync`.

    `requested` where somebody asked for the evidence.
    """
    since: float | None = None
    """Unix time of the last sign of life."""
    culprits: tuple[tuple[int, str], ...] = ()
    """Ranks of this node that are at fault, and why."""
    ranks: tuple[tuple[int, int], ...] = ()
    """Ranks of this node with their pids, as the heartbeats tell.

    Those that do not report may be missing.
    """
    always_ask: bool = False
    """Whether NCCL's RAS is asked although rank 0 is on another node, whose agent asks."""


def file_of(rank: int, pid: int) -> str:
    """Return how the names of a rank's files of evidence begin.

    By pid too: another process may claim the same rank, and what it gives must not mix.
    """
    return f"rank-{rank}-{pid}"


@dataclass(slots=True)
class RankEvidence:
    """What was found of one rank of this node."""

    job: str
    rank: int
    pid: int
    facts: dict[str, Any] = field(default_factory=dict)
    """Answers of the steps `kernel`, `stacks` and `recorder`."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why a step has no answer."""

    @property
    def file(self) -> str:
        """How the names of the rank's files of evidence begin."""
        return file_of(self.rank, self.pid)


@dataclass(slots=True)
class CollectedEvidence:
    """All that was found, for the summary."""

    case: HangCase
    node: str
    begun: float
    """Unix time."""
    seconds: float = 0.0
    ranks: list[RankEvidence] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    """Which ranks lag, by the flight recorders."""
    logs: list[str] = field(default_factory=list)
    """What the jobs' logs say of a failure, one line a job."""
    ras: Mapping[str, Any] | None = None
    moved: list[str] = field(default_factory=list)
    """Counters of GPUs, fabric and kernel that are different at the end."""
    interval: float = 0.0
    """Seconds between the two looks at those."""
    metrics: str = ""
    """The exposition at the beginning."""
    rounds: list[Mapping[str, Any]] = field(default_factory=list)
    """Rounds of probes of the last hour."""
    missing: list[str] = field(default_factory=list)
    """What was not collected, and why."""
    finished: bool = False
