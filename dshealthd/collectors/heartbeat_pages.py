"""Heartbeat pages of training processes on this node, found among their descriptors.

The agent reads what they hold (`training`). The training job needs no mount and makes no extra
system call. Only processes started by a launcher are searched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dshealthd.core.collector import Collector, CollectorOptions, Context, Sample, Worker, gauge
from dshealthd.jobs.heartbeats.page import MAX_PAGES, find_page, open_page
from dshealthd.jobs.processes import Key, ProcessTable, TrainingProcess
from dshealthd.jobs.shares import Claim, share_places
from dshealthd.training.message import PAGE

INFO = gauge(
    "dshealthd_job_heartbeat_page_info",
    "1 for each rank process on this node with a heartbeat page; descriptor is the page's file "
    "descriptor.",
    *("training_job", "rank", "user", "pid", "start", "descriptor", "inode"),
)

AWAITED = gauge(
    "dshealthd_job_heartbeat_pages_awaited",
    "Processes started by a launcher within the last ten minutes that have no heartbeat page yet.",
)

AWAITING = 2.0
"""Seconds between two collections while a page is awaited.

Otherwise there is one whenever other collectors look through the process table anyway, which costs
next to nothing: a process needs longer than that to import torch.
"""
YOUNG = 600.0
"""Seconds for which a process without a page is expected to have one soon: it loads a model and
compiles it before its first step. Of one that is older it takes up to an interval to find it.
"""
MAX_SEARCHED = 64
"""Most processes that are searched in one collection: four on each of 16 GPUs."""
MIN_CHILDREN = 16
"""How many of them may be children of a rank's process, however many ranks there are."""
BUDGET = 0.25
"""Seconds after which no further process is searched in one collection: an eighth of its deadline.
A process with MAX_DESCRIPTORS takes half of them.
"""


class _Page(NamedTuple):
    number: int
    """The process's descriptor."""
    inode: int
    content: bytes


class HeartbeatPages(Collector):
    """Searches training processes without a page, and those whose page does not change: it may have
    given way to another one.

    A process has no page before its first step, and then has to be found soon.
    """

    worker = Worker.STORAGE  # the process table is there, and reads what may hang

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._pages: dict[Key, _Page] = {}
        self._owners: dict[int, Key] = {}
        """The oldest process that has been seen with each page, by inode."""
        self._searched: dict[Key, int] = {}
        """The collection that has searched a process last."""
        self._collection = 0

    @classmethod
    def pace(cls, options: CollectorOptions, samples: Sequence[Sample]) -> float:
        """Return a shorter interval, in seconds, while a heartbeat page is awaited."""
        awaited = any(sample.metric is AWAITED and sample.value for sample in samples)
        return min(options.interval, AWAITING) if awaited else options.interval

    def collect(self) -> Iterator[Sample]:
        """Yield the heartbeat pages of processes that have made them."""
        processes = {process.key: process for process in self._table()}
        self._collection += 1
        silent = self._check(processes)
        own = self._search(processes, silent)
        self._settle()
        begun = time.clock_gettime(time.CLOCK_BOOTTIME) - YOUNG
        awaited = [one for one in own if one.key not in self._pages and one.started > begun]
        yield AWAITED(len(awaited))
        having = [
            process
            for key, process in processes.items()
            if key in self._pages and self._owners[self._pages[key].inode] == key
        ]
        for process in share_places(having, MAX_PAGES, lambda one: (one.user, one.job, one.start)):
            page = self._pages[process.key]
            place = process.launch.rank, process.user, *process.key, page.number, page.inode
            yield INFO(1, process.job, *map(str, place))

    def _table(self) -> Sequence[TrainingProcess]:
        # An unknown user has ended, as its status could not be read.
        found = self.context.shared(ProcessTable).refresh()
        return [process for process in found if process.user is not None]

    def _check(self, processes: dict[Key, TrainingProcess]) -> set[Key]:
        """Drop heartbeat pages that are gone; return the processes whose page has not changed."""
        before, self._pages = self._pages, {}
        for key, page in before.items():
            if key in processes and (now := self._read(key[0], page.number)) is not None:
                self._pages[key] = now
        return {key for key, page in self._pages.items() if page == before[key]}

    def _search(
        self, processes: dict[Key, TrainingProcess], silent: set[Key]
    ) -> list[TrainingProcess]:
        """Search what may have a page that is not known, least recently searched first. Return what
        of it a launcher has started.

        Children of a rank's process come last: data loaders inherit its environment, and the
        process that a script has started may be the one that trains.
        """
        self._searched = {key: self._searched.get(key, 0) for key in processes}
        ranks = {(process.pid, process.job, process.launch.rank) for process in processes.values()}
        own: list[TrainingProcess] = []
        children: list[TrainingProcess] = []
        for key, process in processes.items():
            if key not in self._pages or key in silent:
                place = process.parent, process.job, process.launch.rank
                (children if place in ranks else own).append(process)
        first = share_places(own, MAX_SEARCHED - MIN_CHILDREN, self._claim)
        then = share_places(children, MAX_SEARCHED - len(first), self._claim)
        until = self.context.monotonic() + BUDGET
        for process in (*first, *then):
            if self.context.monotonic() >= until:
                break
            self._searched[process.key] = self._collection
            if (page := self._find(process.pid)) is not None:
                self._pages[process.key] = page
        return own

    def _claim(self, process: TrainingProcess) -> Claim:
        return process.user, process.job, self._searched[process.key]

    def _settle(self) -> None:
        """Determine whose the pages are: a forked child holds its parent's page until it makes its
        own, even when the parent has ended.
        """
        before, self._owners = self._owners, {}
        for key, page in self._pages.items():
            others = (
                owners[page.inode] for owners in (before, self._owners) if page.inode in owners
            )
            self._owners[page.inode] = min((key, *others), key=lambda one: (one[1], one[0]))

    def _find(self, pid: int) -> _Page | None:
        try:
            found = find_page(self.host, pid)
        except OSError:  # it has ended, or access is denied, which open_files reports
            return None
        return None if found is None else _read(*found)

    def _read(self, pid: int, number: int) -> _Page | None:
        try:
            page = open_page(self.host, pid, number)
        except OSError:
            return None
        return None if page is None else _read(page, number)


def _read(page: int, number: int) -> _Page:
    """Read a page, and close it."""
    try:
        return _Page(number, os.fstat(page).st_ino, os.pread(page, PAGE, 0))
    finally:
        os.close(page)
