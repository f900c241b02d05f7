"""A job whose RAS has split into parts that take each other for dead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.ras.question import Loaded
from dshealthd.jobs.ras.status import Communicator, RankLocation, RasRankState, Status, Trouble
from dshealthd.jobs.ras.watched import WatchedJob, own_pid

ELSEWHERE = "192.0.2.1"
RUNNING = Loaded(frozenset({"2.30.7"}), (4000, 4001), "")
STARTS = frozenset({(4000, 1), (4001, 1)})


def answer(what: RasRankState, pid: int, host: str = "127.0.0.1") -> Status:
    """Return an answer of two ranks that says this of the process of one."""
    trouble = Trouble(1, what.value, RankLocation(host, pid, 1))
    world = Communicator(name="a b", size=2, states={}, marks={0: 5}, troubles=(trouble,))
    return Status(version="2.30.7", communicators=(world,))


def job() -> WatchedJob:
    """Return a job of two processes."""
    made = WatchedJob()
    made.record_loaded(RUNNING, STARTS, 1.0)
    return made


def test_who_was_called_dead_answers() -> None:
    """It is split from then on, whoever answers, and until the job restarts."""
    known, seen = job(), []
    for called_dead, answerer in ((4001, 4000), (4000, 4001), (4001, 4000)):
        known.answered(answer(RasRankState.DEAD, called_dead), answerer)
        seen.append(known.split)
    assert seen == [False, True, True]
    assert known.progress.idle is None
    known.record_loaded(RUNNING, frozenset({(5000, 9)}), 4.0)
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
    known = job()
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
