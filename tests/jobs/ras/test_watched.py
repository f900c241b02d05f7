"""What is remembered of a job that is asked: how answers count that come early, and whether its RAS
has split into parts that take each other for dead.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.ras.question import Loaded
from dshealthd.jobs.ras.status import Communicator, RankLocation, RasRankState, Status, Trouble
from dshealthd.jobs.ras.watched import WatchedJob, own_pid
from tests.jobs.machines import stat_line

INTERVAL = 15.0
ELSEWHERE = "192.0.2.1"
LOADED = Loaded(frozenset({"2.30.7"}), (4000,), "")
STARTS = frozenset({(4000, 1)})


def idle(*answers: tuple[float, int], job: WatchedJob | None = None) -> list[int | None]:
    """Return the answers without progress after each answer: when it was asked for, and its
    count.
    """
    job, found = job or WatchedJob(), []
    for at, count in answers:
        job.record_loaded(LOADED, STARTS, at)
        world = Communicator(name="a b", size=2, states={}, marks={0: count})
        status = Status(version="2.30.7", communicators=(world,))
        job.answered(status, 4000, INTERVAL)
        found.append(job.progress.idle)
    return found


def test_regular_answers_count_each() -> None:
    """One a look, or two, with a look that comes a little early."""
    assert idle((0, 1), (15, 2), (30, 2), (44.5, 2), (74.5, 2)) == [None, 0, 1, 2, 3]


def test_early_answers_count_for_the_time_that_they_stand_for() -> None:
    """Two answers 5 s apart tell that nothing moves, and four of them are no minute."""
    early = ((0, 1), (15, 2), (18, 3), (23, 3), (28, 3), (30, 3))
    assert idle(*early) == [None, 0, 0, 1, 1, 1]
    later = tuple((at, 3) for at in (45, 60, 75, 90))
    # Progress was seen at 18 s: the fourth answer without comes a minute after it at the soonest.
    assert idle(*early, *later)[6:] == [1, 2, 3, 4]


def test_early_progress_counts_at_once() -> None:
    """That a job moves again is said, however soon after the last answer."""
    assert idle((0, 1), (15, 1), (18, 2), (23, 2)) == [None, 1, 0, 1]


@pytest.mark.parametrize(("still", "rarely"), [(0, True), (1, False), (40, False), (41, True)])
def test_how_often_a_job_is_asked(tmp_path: Path, still: int, *, rarely: bool) -> None:
    """Rarely while it makes progress, and again after ten minutes without, as a dead one has."""
    (tmp_path / "4000").mkdir()
    (tmp_path / "4000" / "stat").write_bytes(stat_line(4000, start=1))
    job, looks = WatchedJob(), 2 + still
    idle(*((INTERVAL * look, min(look, 1)) for look in range(looks)), job=job)
    now = INTERVAL * (looks - 1)
    assert job.due(Host(procfs=tmp_path), now + INTERVAL, 300.0) is not rarely
    assert job.due(Host(procfs=tmp_path), now + 299.0, 300.0)
    assert job.due(Host(procfs=tmp_path), now + 298.9, 300.0) is not rarely


def answer(what: RasRankState, pid: int, host: str = "127.0.0.1") -> Status:
    """Return an answer of two ranks that says this of the process of one."""
    trouble = Trouble(1, what.value, RankLocation(host, pid, 1))
    world = Communicator(name="a b", size=2, states={}, marks={0: 5}, troubles=(trouble,))
    return Status(version="2.30.7", communicators=(world,))


def test_who_was_called_dead_answers() -> None:
    """It is split from then on, whoever answers, and until the job restarts."""
    known, seen = WatchedJob(), []
    known.record_loaded(LOADED, STARTS, 1.0)
    for called_dead, answerer in ((4001, 4000), (4000, 4001), (4001, 4000)):
        known.answered(answer(RasRankState.DEAD, called_dead), answerer)
        seen.append(known.split)
    assert seen == [False, True, True]
    assert known.progress.idle is None
    known.record_loaded(LOADED, frozenset({(5000, 9)}), 4.0)
    known.answered(answer(RasRankState.DEAD, 4001), 4000)
    assert [known.split] == [False]


@pytest.mark.parametrize("before", [
    # It was silent for a while, which heals.
    answer(RasRankState.UNRESPONSIVE, 4001),
    # Another node has a process of the same number.
    answer(RasRankState.DEAD, 4001, ELSEWHERE),
])  # fmt: skip
def test_no_split(before: Status) -> None:
    """An answer of a process that was not called dead proves nothing."""
    known = WatchedJob()
    known.record_loaded(LOADED, STARTS, 1.0)
    known.answered(before, 4000)
    known.answered(answer(RasRankState.UNRESPONSIVE, 4000), 4001)
    assert not known.split


def test_own_pid(tmp_path: Path) -> None:
    """The number in the innermost namespace counts, as NCCL tells that one."""
    real = Path("/proc")
    assert own_pid(Host(procfs=real, sysfs=real, dev=real), os.getpid()) == os.getpid()
    (tmp_path / "77").mkdir()
    (tmp_path / "77/status").write_text("Name:\tpython\nNSpid:\t77\t12\t3\n")
    host = Host(procfs=tmp_path, sysfs=real, dev=real)
    assert own_pid(host, 77) == 3
    assert own_pid(host, 78) is None
