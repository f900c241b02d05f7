"""The summary of a RAS answer: numbers by size of communicator, and lagging or troubled ranks.

A large job has thousands of communicators, and their names change with each restart. Their sizes
(all ranks, a pipeline stage, a tensor-parallel group) are few and stable.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.jobs.ras.status import MAX_NAMED, RasRankState, Spread, severity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.jobs.ras.progress import JobProgress
    from dshealthd.jobs.ras.status import Communicator, RankLocation, Status

MAX_SIZES = 8
"""Most sizes shown separately, the largest first; smaller ones are shown together."""
OTHER_SIZES = "other"


@dataclass(slots=True)
class SizeClass:
    """All communicators of one size."""

    communicators: int = 0
    compared: int = 0
    """Number of them that were in the previous answer, too."""
    moving: int = 0
    """Number of those that have changed since."""
    states: Counter[RasRankState] = field(default_factory=Counter)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    operations: dict[str, Spread] = field(default_factory=dict)
    """By operation, the spread of the communicator whose ranks are furthest apart."""

    def add(self, communicator: Communicator, moving: bool | None) -> None:  # noqa: FBT001 - a value of `JobProgress.moving`
        """Add a communicator of this size."""
        self.communicators += 1
        if moving is not None:
            self.compared += 1
            self.moving += moving
        self.states.update(communicator.states)
        self.errors.update(communicator.errors)
        for name, spread in communicator.operations.items():
            widest = self.operations.get(name)
            if widest is None or (spread.width, spread.most) > (widest.width, widest.most):
                self.operations[name] = spread


class RankLabel(NamedTuple):
    """A rank as people know it: its number among all ranks of the job, if known, and where it
    runs.
    """

    number: str
    host: str
    gpu: str


def classes(status: Status, moving: Mapping[str, bool]) -> dict[str, SizeClass]:
    """Return the communicators of a RAS answer by size."""
    sizes = sorted({communicator.size for communicator in status.communicators}, reverse=True)
    names = {
        size: str(size) for size in (sizes if len(sizes) <= MAX_SIZES else sizes[: MAX_SIZES - 1])
    }
    found: dict[str, SizeClass] = {}
    for communicator in status.communicators:
        name = names.get(communicator.size, OTHER_SIZES)
        found.setdefault(name, SizeClass()).add(communicator, moving.get(communicator.name))
    return found


def lags(
    status: Status, progress: JobProgress, world_size: int | None
) -> dict[tuple[RankLabel, str], int]:
    """Return by how many operations ranks lag, by rank and operation.

    The furthest behind come first, at most `MAX_NAMED`. Only stalled communicators count: in one
    that makes progress, some ranks are always ahead, which means nothing.
    """
    found: dict[tuple[RankLabel, str], int] = {}
    for communicator in filter(progress.stands_still, status.communicators):
        for lag in communicator.behind:
            key = _rank(status, communicator, lag.rank, lag.place, world_size), lag.operation
            found[key] = max(lag.behind, found.get(key, 0))
    return dict(heapq.nsmallest(MAX_NAMED, found.items(), key=lambda entry: (-entry[1], entry[0])))


def troubles(status: Status, world_size: int | None) -> list[tuple[RankLabel, str]]:
    """Return the ranks that are dead, have an error or are unresponsive, in this order, each with
    its trouble; at most `MAX_NAMED`.
    """
    found = {
        (_rank(status, communicator, trouble.rank, trouble.place, world_size), trouble.what)
        for communicator in status.communicators
        for trouble in communicator.troubles
    }
    return heapq.nsmallest(MAX_NAMED, found, key=lambda entry: (severity(entry[1]), entry))


def _rank(
    status: Status,
    communicator: Communicator,
    rank: int,
    place: RankLocation | None,
    world_size: int | None,
) -> RankLabel:
    """Return a rank with its number in the communicator of all ranks, if there is one."""
    number = ""
    if world_size is not None and world_size == max(
        communicator.size for communicator in status.communicators
    ):
        if place is not None and place in status.ranks:
            number = str(status.ranks[place])
        elif communicator.size == world_size:
            number = str(rank)
    return RankLabel(
        number, place.host if place else "", str(place.gpu) if place and place.gpu >= 0 else ""
    )
