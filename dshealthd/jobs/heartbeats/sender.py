"""Senders of heartbeats: each one's page and last message, and which of them are a rank's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dshealthd.jobs.environment import RENDEZVOUS
from dshealthd.jobs.goodput import Goodput
from dshealthd.jobs.heartbeats.identity import Identity, UnidentifiedSender
from dshealthd.jobs.heartbeats.page import PageHolder
from dshealthd.jobs.own_work import Course
from dshealthd.training.message import Message


@dataclass(eq=False, slots=True)
class Sender:
    """One process and its page."""

    holder: PageHolder
    process: int
    """A pidfd, which shows the end of the process; -1 before Linux 5.3."""
    looked: float = 0.0
    """Monotonic time of the last read of its page; 0 before, as no read bounds its message's age.
    """
    who: Identity | UnidentifiedSender = UnidentifiedSender.PENDING
    page: int | None = None
    """The page's descriptor."""
    number: int = -1
    """The same in the process itself."""
    data: bytes = b""
    """Content of the page at its last valid read."""
    torn: int = 0
    """Consecutive reads since then without a whole message."""
    message: Message | None = None
    heard: float = 0.0
    """Unix time in seconds at which the last message was written."""
    course: Course = field(default_factory=Course)
    """What its messages told of its steps."""
    goodput: Goodput = field(default_factory=Goodput)
    """Where they say that its time went."""


def by_rank(
    senders: Iterable[tuple[Identity, Sender]],
) -> dict[tuple[str, int], list[tuple[Identity, Sender]]]:
    """Return the senders of each job and rank, the one that started last at the end.

    Children of other senders of the same rank are left out. If a job has several runs here, as a
    sweep within one allocation does, its ranks are those of the run with the most, or of the one
    that started last: ranks of different runs do not wait for each other. Another run's process of
    the same rank stands before.
    """
    ranks: dict[tuple[str, int], list[tuple[Identity, Sender]]] = defaultdict(list)
    runs: dict[str, dict[tuple[str, ...], dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for who, sender in senders:
        ranks[who.process.job, who.process.launch.rank].append((who, sender))
    for (job, rank), found in ranks.items():
        pids = {who.process.pid for who, _ in found}
        # Of processes that are all each other's children, by pids that were used again, all.
        found[:] = [entry for entry in found if entry[0].process.parent not in pids] or found
        for who, _ in found:
            runs[job][_run(who)][rank] = who.process.start
    chosen = {
        job: max(of_job.items(), key=lambda run: (len(run[1]), max(run[1].values())))[0]
        for job, of_job in runs.items()
    }
    for key, found in list(ranks.items()):
        run = chosen[key[0]]
        found.sort(
            key=lambda entry: (_run(entry[0]) == run, entry[0].process.start, entry[0].process.pid)
        )
        if _run(found[-1][0]) != run:
            del ranks[key]
    return ranks


def _run(who: Identity) -> tuple[str, ...]:
    """Return what the ranks of a run on one node have in common."""
    return tuple(who.process.environment.get(name, "") for name in RENDEZVOUS)
