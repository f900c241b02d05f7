"""The summary of a RAS answer that is shown: sizes, lags and troubles of communicators.

Numbers by size of communicator, and the few ranks that are behind or in trouble.

A large job has thousands of communicators, and their names change with each restart; their sizes
(all ranks, those of a pipeline stage, those of a tensor-parallel group) are few and stay.
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
"""Sizes that are told apart, the largest first; smaller ones are shown together."""
OTHER_SIZES = "other"
UNCLEAR = "unclear"
"""Stands for the number of a rank that is behind and that NCCL does not name."""


@dataclass(slots=True)
class SizeClass:
    """All communicators of one size."""

    communicators: int = 0
    compared: int = 0
    """How many of them were in the answer before, too."""
    moving: int = 0
    """How many of those have changed since."""
    states: Counter[RasRankState] = field(default_factory=Counter)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    operations: dict[str, Spread] = field(default_factory=dict)
    """By operation, that of the communicator whose ranks are furthest apart."""

    def add(self, communicator: Communicator, moving: bool | None) -> None:  # noqa: FBT001 - what `JobProgress.moving` has
        """Count one more communicator of this size."""
        alike = communicator.alike
        self.communicators += alike
        if moving is not None:
            self.compared += alike
            self.moving += alike * moving
        for state, ranks in communicator.states.items():
            self.states[state] += alike * ranks
        self.errors.update(communicator.errors)
        for name, spread in communicator.operations.items():
            widest = self.operations.get(name)
            if widest is None or (spread.width, spread.most) > (widest.width, widest.most):
                self.operations[name] = spread


class RankLabel(NamedTuple):
    """A rank as people know it: its number among all ranks of the job where that is known, and
    where it runs.
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
    """Return by how many operations ranks are behind by RAS, with the operation.

    The furthest first, at most `MAX_NAMED`.

    Where NCCL does not name who is, the rank is `UNCLEAR`, once for each operation.

    Those of communicators that stand still: in one that gets on, some ranks are ahead at any
    moment, and it means nothing.
    """
    found: dict[tuple[RankLabel, str], int] = {}
    for communicator in filter(progress.stands_still, status.communicators):
        for lag in communicator.behind:
            key = _rank(status, communicator, lag.rank, lag.place, world_size), lag.operation
            found[key] = max(lag.behind, found.get(key, 0))
        for operation in communicator.unclear:
            key = RankLabel(UNCLEAR, "", ""), operation
            width = communicator.operations[operation].width
            found[key] = max(width, found.get(key, 0))
    return dict(heapq.nsmallest(MAX_NAMED, found.items(), key=lambda entry: (-entry[1], entry[0])))


def troubles(status: Status, world_size: int | None) -> list[tuple[RankLabel, str]]:
    """Return the ranks that are dead, have an error or are unresponsive, in this order, with what
    it is; at most `MAX_NAMED`.
    """
    found = {
        (_rank(status, communicator, trouble.rank, trouble.place, world_size), trouble.what)
        for communicator in status.communicators
        for trouble in communicator.troubles
    }
    # 2.24 does not say who is missing from a smaller communicator; as a rule it is who is named.
    named = {what for rank, what in found if any(rank)}
    found = {(rank, what) for rank, what in found if any(rank) or what not in named}
    return heapq.nsmallest(MAX_NAMED, found, key=lambda entry: (severity(entry[1]), entry))


def _rank(
    status: Status,
    communicator: Communicator,
    rank: int,
    place: RankLocation | None,
    world_size: int | None,
) -> RankLabel:
    """Return a rank with the number that RAS gives it in the communicator of all ranks, if there is
    one and it is of this size.
    """
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
