"""Fair sharing of a limited number of places among jobs and ranks: users take turns, then jobs.

By age alone, one user's idle processes would keep everybody's new jobs out as long as they live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from dshealthd.jobs.processes import TrainingProcess

T = TypeVar("T")
Claim: TypeAlias = tuple[Hashable, Hashable, float]
"""User, job and start of what wants a place."""

MAX_JOBS = 16
"""Most jobs of a node that get series: a GPU each on the largest nodes, which have 16."""
MAX_RANKS = 64
"""Most ranks that do: four processes on each of 16 GPUs."""


def share_places(entries: Iterable[T], places: int, claim: Callable[[T], Claim]) -> list[T]:
    """Return the entries that get one of `places`; `claim` tells whose an entry is.

    Users take turns, and the jobs of each user take turns; the oldest goes first.
    """
    oldest = sorted(((claim(entry), entry) for entry in entries), key=lambda one: one[0][2])
    by_job = _in_turns(oldest, lambda one: one[0][:2])
    return [entry for _, entry in _in_turns(by_job, lambda one: one[0][0])][:places]


def jobs_with_places(processes: Iterable[TrainingProcess]) -> dict[str, list[TrainingProcess]]:
    """Return the processes of the jobs that get one of `MAX_JOBS` places."""
    found: dict[str, list[TrainingProcess]] = {}
    for process in processes:
        found.setdefault(process.job, []).append(process)

    def claim(entry: tuple[str, list[TrainingProcess]]) -> Claim:
        job, members = entry
        return members[0].user, job, min(process.start for process in members)

    return dict(share_places(found.items(), MAX_JOBS, claim))


def _in_turns(entries: Iterable[T], group: Callable[[T], Hashable]) -> list[T]:
    """Return the entries in an order in which groups take turns."""
    before: Counter[Hashable] = Counter()
    turns: list[tuple[int, T]] = []
    for entry in entries:
        turns.append((before[group(entry)], entry))
        before[group(entry)] += 1
    return [entry for _, entry in sorted(turns, key=itemgetter(0))]
