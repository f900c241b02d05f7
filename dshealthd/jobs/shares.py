"""Fair sharing of a limited number of places among jobs and ranks: users take turns, then jobs.

By age alone, one user's idle processes would keep everybody's new jobs out as long as they live.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from dshealthd.core.collector import gauge
from dshealthd.core.options import option

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from dshealthd.core.collector import Metric
    from dshealthd.jobs.processes import TrainingProcess

T = TypeVar("T")


def shared(
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


def jobs(
    processes: Iterable[TrainingProcess], places: int
) -> tuple[dict[str, list[TrainingProcess]], int]:
    """Return the processes of the jobs that get one of `places`, and how many jobs get none."""
    found: dict[str, list[TrainingProcess]] = {}
    for process in processes:
        found.setdefault(process.job, []).append(process)
    chosen = shared(
        found.items(),
        places,
        lambda entry: entry[1][0].user,
        lambda entry: entry[0],
        lambda entry: min(process.start for process in entry[1]),
    )
    return dict(chosen), len(found) - len(chosen)


def max_jobs(places: int, gain: str = "get their own series", *, least: int = 1) -> Any:
    """Declare the option of how many jobs `jobs` lets in; `gain` says what they get."""
    description = f"Training jobs that {gain}: users take turns, oldest job first."
    return option(places, description, minimum=least, maximum=1000)


def jobs_left_out(name: str, loss: str) -> Metric:
    """Declare the number of jobs that `jobs` leaves out; `loss` says what is not known of them."""
    return gauge(name, f"Training jobs on this node {loss} because there are more than max_jobs.")


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
