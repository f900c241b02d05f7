"""What a right answer of RAS says, by the books of a job; answers are compared field by field."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dshealthd.jobs.ras.status import (
    Communicator,
    Lag,
    RankLocation,
    RasRankState,
    Status,
    Trouble,
)
from tests.nccl.job import GPUS, Book, Fate, Job

COUNTED = ("AllGather", "AllReduce", "Broadcast", "Reduce", "ReduceScatter")
DEAD_AFTER = 55.0
"""Seconds before which RAS gives nobody up (`RAS_PEER_DEAD_TIMEOUT` is 60 s)."""
DEAD_BY = 90.0
"""Seconds after which it has, on a machine with other work."""


def place(job: Job, rank: int) -> RankLocation:
    """Return where a rank runs."""
    return RankLocation("127.0.0.1", job.ranks[rank].pid, rank % GPUS)


def absence(job: Job, rank: int) -> set[RasRankState]:
    """Return what RAS may say of the process of a rank; nothing if it must answer."""
    found = job.ranks[rank]
    if found.fate is Fate.RUNS:
        return set()
    silent = time.monotonic() - found.since
    allowed = set()
    if silent < DEAD_BY:
        allowed.add(RasRankState.UNRESPONSIVE)
    if silent > DEAD_AFTER:
        allowed.add(RasRankState.DEAD)
    return allowed


def differences(job: Job, status: Status, version: str) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    gone = [rank.number for rank in job.ranks if rank.fate is not Fate.RUNS]
    if status.version != version:
        yield f"version {status.version}, not {version}"
    world = job.books["world"]
    if status.ranks != {place(job, rank): number for number, rank in enumerate(world.members)}:
        yield f"ranks {dict(status.ranks)}"
    names = [communicator.name for communicator in status.communicators]
    if len(set(names)) != len(names):
        yield f"names that are not unique: {names}"
    found = Counter(_told(communicator) for communicator in status.communicators)
    right: Counter[Any] = Counter()
    states = _states(job, status)
    for name, book in job.books.items():
        if set(book.members) <= book.left | set(gone):
            continue  # nobody is left who could tell of it
        right[_told(expected(job, name, book, states))] += 1
    for told in found - right:
        yield f"told, and not true: {told}"
    for told in right - found:
        yield f"true, and not told: {told}"


def _states(job: Job, status: Status) -> dict[int, RasRankState]:
    """Return the state of each missing process, as the answer has it where it may choose."""
    dead = {
        trouble.place.pid
        for communicator in status.communicators
        for trouble in communicator.troubles
        if trouble.what == RasRankState.DEAD and trouble.place is not None
    }
    states = {}
    for rank in job.ranks:
        if allowed := absence(job, rank.number):
            said = RasRankState.DEAD if rank.pid in dead else RasRankState.UNRESPONSIVE
            states[rank.number] = said if said in allowed else min(allowed)
    return states


def expected(job: Job, name: str, book: Book, states: dict[int, RasRankState]) -> Communicator:
    """Return a communicator as a right answer tells of it."""
    present = {
        rank: number
        for number, rank in enumerate(book.members)
        if rank not in book.left and rank not in states
    }
    counts = {rank: {kind: book.launched[rank][kind] for kind in COUNTED} for rank in present}
    most = {kind: max(count[kind] for count in counts.values()) for kind in COUNTED}
    numbered = list(enumerate(book.members))
    tally = Counter({RasRankState.RUNNING: len(present)})
    tally.update(
        states.get(rank, RasRankState.NOT_MEMBER) for _, rank in numbered if rank not in present
    )
    return Communicator(
        name=name,
        size=len(book.members),
        states={state: number for state, number in tally.items() if number},
        marks={number: sum(counts[rank].values()) for rank, number in present.items()},
        behind=tuple(
            Lag(number, kind, most[kind] - counts[rank][kind], place(job, rank))
            for rank, number in present.items()
            for kind in COUNTED
            if counts[rank][kind] < most[kind]
        ),
        troubles=tuple(
            Trouble(number, states[rank].value, place(job, rank))
            for number, rank in numbered
            if rank in states
        ),
    )


def _told(communicator: Communicator) -> tuple[Any, ...]:
    """Return all that is said of a communicator but its name, which NCCL makes up."""
    return (
        communicator.size,
        frozenset((state, number) for state, number in communicator.states.items() if number),
        frozenset(communicator.marks.items()),
        frozenset(communicator.behind),
        frozenset(communicator.troubles),
    )
