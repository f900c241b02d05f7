"""The evaluation of a RAS answer: whether an intact NCCL gives it, the job's progress since the
last, communicators by size, and lagging or troubled ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dshealthd.jobs.nccl.release import without_build
from dshealthd.jobs.ras import policy
from dshealthd.jobs.ras.status import (
    REMOTE_ERROR,
    Communicator,
    ImpossibleAnswer,
    RankLocation,
    RasRankState,
    Status,
)

MAX_NAMED = 8
"""Most ranks of a job that are named, both of lagging ranks and of ranks in trouble."""
MAX_SIZES = 8
"""Most sizes shown separately, the largest first; smaller ones are shown together."""
OTHER_SIZES = "other"


class RankLabel(NamedTuple):
    """A rank as people know it: its number among all ranks of the job, if known, and where it
    runs.
    """

    number: str
    host: str
    gpu: str


def by_size(status: Status) -> tuple[Counter[str], Counter[tuple[str, RasRankState]]]:
    """Return the number of communicators by size, and of their ranks by size and state."""
    sizes = sorted({communicator.size for communicator in status.communicators}, reverse=True)
    shown = sizes if len(sizes) <= MAX_SIZES else sizes[: MAX_SIZES - 1]
    communicators: Counter[str] = Counter()
    ranks: Counter[tuple[str, RasRankState]] = Counter()
    for communicator in status.communicators:
        size = str(communicator.size) if communicator.size in shown else OTHER_SIZES
        communicators[size] += 1
        for state, count in communicator.states.items():
            ranks[size, state] += count
    return communicators, ranks


def lags(
    status: Status, progress: JobProgress, world_size: int | None
) -> dict[tuple[RankLabel, str], int]:
    """Return by how many operations ranks lag, by rank and operation.

    The furthest behind come first, at most `MAX_NAMED`. Only stalled communicators count: in one
    that makes progress, some ranks are always ahead, which means nothing.
    """
    found: dict[tuple[RankLabel, str], int] = {}
    for communicator in filter(progress.has_stalled, status.communicators):
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
    # A dead process is more certain than an error, and an error more than silence; consequences of
    # another rank's trouble come last.
    order = {RasRankState.DEAD.value: 0, RasRankState.UNRESPONSIVE.value: 2, REMOTE_ERROR: 3}
    return heapq.nsmallest(MAX_NAMED, found, key=lambda entry: (order.get(entry[1], 1), entry))


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


@dataclass(slots=True)
class JobProgress:
    """Whether a job progresses from one RAS answer to the next.

    Only ranks and communicators that are in both answers are compared: one that appears or falls
    silent is not progress. A count that is lower than before belongs to another communicator of the
    same name, and counts as a change.
    """

    idle: int | None = None
    """Consecutive answers in which no count had changed; an early one counts only as the first.

    None if the last two answers could not be compared.
    """
    moving: Mapping[str, bool] = field(default_factory=dict)
    """Whether each communicator that is in both answers has changed since the previous one."""
    _marks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def update(self, status: Status, *, early: bool = False) -> None:
        """Record a RAS answer.

        Of `early` answers, before their interval was over, only the first counts as idle: alerts
        use the count as elapsed time.
        """
        marks = {communicator.name: communicator.marks for communicator in status.communicators}
        changes = {
            name: _changed(self._marks.get(name, {}), after) for name, after in marks.items()
        }
        self.moving = {name: changed for name, changed in changes.items() if changed is not None}
        self._marks = marks
        if not self.moving:
            self.idle = None
        elif any(self.moving.values()):
            self.idle = 0
        elif not (early and self.idle):
            self.idle = (self.idle or 0) + 1

    def has_stalled(self, communicator: Communicator) -> bool:
        """Return whether a communicator is known not to have changed since the previous answer."""
        return self.moving.get(communicator.name) is False


def _changed(before: Mapping[int, int], after: Mapping[int, int]) -> bool | None:
    """Return whether a count differs; None if there is nothing to compare."""
    common = before.keys() & after.keys()
    return any(before[mark] != after[mark] for mark in common) if common else None


def check(status: Status, versions: Iterable[str | None], world_size: int | None) -> None:
    """Raise ImpossibleAnswer if a RAS answer cannot be true.

    `versions` are those that the processes have mapped, `world_size` is the launcher's.
    """
    for communicator in status.communicators:
        name, size = communicator.name or "a communicator", communicator.size
        counted = sum(communicator.states.values())
        if size < 1:
            _refuse(f"{name} has the size {size}")
        if world_size is not None and size > world_size:
            _refuse(f"{name} has {size} ranks, but the job {world_size}")
        if counted > size:
            _refuse(f"{name} has {size} ranks, but {counted} are reported")
        named = [lag.rank for lag in communicator.behind]
        named += [trouble.rank for trouble in communicator.troubles]
        if any(not 0 <= rank < size for rank in named):
            _refuse(f"{name} has {size} ranks, but one outside of them is named")
    mapped = set(versions)
    if (
        status.version
        and None not in mapped
        and without_build(status.version)
        not in {without_build(version or "") for version in mapped}
    ):
        _refuse(f"NCCL {status.version} answers, but {', '.join(map(str, mapped))} is mapped")
    if status.version and policy.decide(status.version).reason is policy.AskReason.UNSAFE:
        _refuse(f"NCCL {status.version} answers, which is unsafe to query")


def check_change(before: Status, after: Status, world_size: int | None) -> None:
    """Raise ImpossibleAnswer if the next answer of the same processes cannot follow the previous.

    A job may end its communicators at any time, but the one of all ranks ends last: it cannot be
    missing while others remain.
    """
    if world_size is None or not after.communicators:
        return
    had, has = (
        any(communicator.size == world_size for communicator in status.communicators)
        for status in (before, after)
    )
    if had and not has:
        _refuse(f"the communicator of all {world_size} ranks has vanished")


def _refuse(message: str) -> None:
    raise ImpossibleAnswer(message)
