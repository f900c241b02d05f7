"""The case that a collection of evidence is about, and its findings on each rank.

The case travels as JSON from the agent to the collecting process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from dshealthd.core import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCase:
    """Why evidence is taken, and what is known beforehand."""

    job: str
    """Empty for all jobs of the node."""
    reason: str
    """The class of the hang, such as `desync`; `requested` if somebody requested the evidence."""
    since: float | None = None
    """Unix time of the last progress."""
    culprits: Sequence[tuple[int, str]] = ()
    """Culprits among this node's ranks, and the problem of each, in words."""
    explanation: str = ""
    """The cause of the hang in words."""
    ranks: Sequence[tuple[int, int]] = ()
    """Ranks of this node with their pids, from heartbeats; ranks that send none may be missing."""
    always_ask: bool = False
    """Whether to query NCCL RAS although rank 0 is not found: it has ended here, or is on another
    node, whose agent queries it for a hang.
    """


class LogSources(NamedTuple):
    """The logs that a collection reads, beside the output of the ranks."""

    paths: tuple[str, ...] = ()
    """Patterns of the jobs' logs."""
    journal: bool = False
    """Whether the kernel log is read from the journal, as by the collector `kernel_log`."""


def file_of(rank: int, pid: int) -> str:
    """Return the prefix of the names of a rank's evidence files.

    It includes the pid: another process may claim the same rank, and their files must not mix.
    """
    return f"rank-{rank}-{pid}"


@dataclass(slots=True)
class RankEvidence:
    """The findings on one rank of this node."""

    job: str
    rank: int
    pid: int
    start: int = 0
    parent: int = 0
    world: int | None = None
    environment: dict[str, Annotated[str, schema.String()]] | None = None
    """Variables that the steps of a collection use; None if it could not be inspected."""
    facts: dict[str, Any] = schema.transient(default_factory=dict)
    """Answers of the steps `kernel`, `stacks` and `recorder`."""
    problems: dict[str, str] = schema.transient(default_factory=dict)
    """Why a step has no answer."""

    @property
    def file(self) -> str:
        """Prefix of the names of the rank's evidence files."""
        return file_of(self.rank, self.pid)


@dataclass(slots=True)
class NodeMembers:
    """The ranks on this node, as a process of its own has found them."""

    ranks: list[RankEvidence]
    more: int
    """Number of further ranks."""
    jobs: list[str]
    """All jobs of the node."""
    unseen: dict[str, int]
    """Number of processes that could not be inspected, by reason."""


@dataclass(slots=True)
class CollectedEvidence:
    """All findings, for the summary."""

    case: HangCase
    node: str
    begun: float
    """Unix time."""
    seconds: float = 0.0
    ranks: list[RankEvidence] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    """Lagging ranks, by the flight recorders."""
    logs: list[str] = field(default_factory=list)
    """Failures found in the jobs' logs, one line per job."""
    ras: Mapping[str, Any] | None = None
    moved: list[str] = field(default_factory=list)
    """GPU, fabric and kernel metrics that changed during the collection."""
    interval: float = 0.0
    """Seconds between the two expositions that `moved` compares."""
    metrics: str = ""
    """The exposition at the beginning."""
    jobs: Sequence[Mapping[str, Any]] = ()
    """The jobs of the agent's status document at the beginning."""
    rounds: list[Mapping[str, Any]] | None = None
    """Probe rounds of the last hour; None if they are unknown."""
    missing: list[str] = field(default_factory=list)
    """What was not collected, and why."""
    finished: bool = False
