"""Fair sharing of a limited number of places among jobs and ranks: users take turns, then jobs.

By age alone, one user's idle processes would keep everybody's new jobs out as long as they live.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from dshealthd.jobs.processes import TrainingProcess

T = TypeVar("T")

MAX_JOBS = 16
"""Most jobs of a node that get series: a GPU each on the largest nodes, which have 16."""
MAX_RANKS = 64
"""Most ranks that do: four processes on each of 16 GPUs."""


def share_places(
    entries: Iterable[T],
    places: int,
    user: Callable[[T], Hashable],
    job: Callable[[T], Hashable],
    start: Callable[[T], int],
) -> list[T]:
    """Return the entries that get one of `places`.

    Users take turns, and the jobs of each user take turns; the oldest goes first.
    """
    oldest = sorted(entries, key=start)
    turns = _turns(oldest, lambda entry: (user(entry), job(entry)))
    by_job = [entry for _, entry in sorted(zip(turns, oldest, strict=True), key=_turn)]
    turns = _turns(by_job, user)
    by_user = [entry for _, entry in sorted(zip(turns, by_job, strict=True), key=_turn)]
    return by_user[:places]


def jobs_with_places(processes: Iterable[TrainingProcess]) -> dict[str, list[TrainingProcess]]:
    """Return the processes of the jobs that get one of `MAX_JOBS` places."""
    found: dict[str, list[TrainingProcess]] = {}
    for process in processes:
        found.setdefault(process.job, []).append(process)
    chosen = share_places(
        found.items(),
        MAX_JOBS,
        lambda entry: entry[1][0].user,
        lambda entry: entry[0],
        lambda entry: min(process.start for process in entry[1]),
    )
    return dict(chosen)


def _turns(entries: Iterable[T], group: Callable[[T], Hashable]) -> list[int]:
    """Return for each entry how many of its group come before it."""
    before: Counter[Hashable] = Counter()
    turns = []
    for entry in entries:
        turns.append(before[group(entry)])
        before[group(entry)] += 1
    return turns


def _turn(entry: tuple[int, object]) -> int:
    return entry[0]
