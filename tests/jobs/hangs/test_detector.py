"""What the detector remembers of jobs that stand still, and which jobs it suspects to."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.detector import HangDetector, Suspicions, _is_quiet, suspicious
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.states import RankState, Work
from dshealthd.jobs.heartbeats.identity import Identity
from dshealthd.jobs.heartbeats.sender import Sender
from dshealthd.jobs.options import HangOptions
from dshealthd.linux.activity import ThreadState
from dshealthd.training.message import Message, StepStage
from tests.jobs.machines import TORCH, stat_line, training_process
from tests.jobs.standstills import rank_state

FLOOR = 30.0

JOB = "run-1"
PID = 1 << 23
"""Larger than any process has."""
STEP = 2.0


class Watched:
    """A rank that a detector watches, check by check."""

    def __init__(self, path: Path) -> None:
        self._process = training_process(PID, {**TORCH, "RANK": "0", "WORLD_SIZE": "1"})
        (path / str(PID)).mkdir()
        (path / str(PID) / "stat").write_bytes(stat_line(PID, start=1))
        self.clock = self._sent = 1000.0
        self._step = 0
        self.work = Work()
        self.detector = HangDetector(
            HangOptions(),
            Host(procfs=path),
            monotonic=lambda: self.clock,
            wall=lambda: self.clock,
            work=lambda _job: self.work,
        )
        for _ in range(30):
            self.look(moves=True)

    def look(self, *, moves: bool) -> None:
        """Check it again, after a step or without one."""
        self.clock += STEP
        self._step += moves
        if moves:
            self._sent = self.clock
        message = Message(step=self._step, sent=self._sent, stage=StepStage.BACKWARD)
        sender: Any = SimpleNamespace(message=message)
        ranks = {(JOB, 0): [(Identity(self._process, (1, 7)), cast("Sender", sender))]}
        self.detector.check(ranks)

    def still(self, seconds: float, work: Work | None = None) -> HangClass | None:
        """Return why it stands still after so many seconds without a step."""
        self.work = work or Work()
        for _ in range(round(seconds / STEP)):
            self.look(moves=False)
        found = self.detector.standstills.get(JOB)
        return None if found is None else found.reason

    def close(self) -> None:
        """Watch it no longer."""
        self.detector.close()


GPUS, CHILDREN = Work("its GPUs compute"), Work(computes=True)


@pytest.mark.parametrize("at_work", [GPUS, CHILDREN])
async def test_a_job_at_work_teaches_nothing(tmp_path: Path, at_work: Work) -> None:
    """A job whose GPUs or child processes compute is in a pause, also between two samples that show
    it.
    """
    with contextlib.closing(Watched(tmp_path)) as watched:
        assert watched.still(FLOOR + 100.0, at_work) is HangClass.WORKING
        assert watched.still(26.0) is HangClass.WORKING
        assert watched.still(8.0) is HangClass.WAITING
        watched.look(moves=True)
        assert watched.detector.jobs[JOB][0].bound == FLOOR
        assert watched.still(FLOOR + 2 * STEP) is HangClass.WAITING
        before = watched.detector.jobs[JOB][0].silence
        watched.clock += 1000.0  # of which nobody knows anything: three checks' time counts
        watched.look(moves=False)
        assert watched.detector.jobs[JOB][0].silence - before == 6.0


async def test_a_job_whose_children_computed(tmp_path: Path) -> None:
    """It is in a pause for half a minute after they last did, from the half of its usual silence
    on; before 20 s, samples may be those of its last step.
    """
    with contextlib.closing(Watched(tmp_path)) as watched:
        watched.still(20.0, CHILDREN)
        assert watched.still(FLOOR + 2 * STEP - 20.0) is HangClass.WAITING
        watched.look(moves=True)
        watched.still(22.0, CHILDREN)
        assert watched.still(28.0) is HangClass.WORKING
        assert watched.still(4.0) is HangClass.WAITING
        for _ in range(5):
            watched.detector.check({})
        assert not watched.detector._worked, "it has closed its heartbeat"


def test_what_is_reported() -> None:
    """Hangs, and what is one unless a rank elsewhere is at work."""
    standstills = {
        reason: SimpleNamespace(reason=reason, is_pause=reason is not HangClass.PROCESS)
        for reason in (HangClass.PROCESS, HangClass.COLLECTIVE, HangClass.WORKING)
    }
    reported: Any = HangDetector.reported
    found = [still.reason for still in reported.fget(SimpleNamespace(standstills=standstills))]
    assert found == [HangClass.PROCESS, HangClass.COLLECTIVE]


HEARD = rank_state(1.0)
SILENT = replace(HEARD, silence=15.1)


@pytest.mark.parametrize(("ranks", "expected"), [
    ([SILENT, SILENT], True),
    ([replace(SILENT, silence=14.9)] * 2, False),
    ([SILENT, HEARD], False),  # a rank that waits for nobody: an uneven step
    ([HEARD, HEARD], False),
    ([replace(SILENT, bound=40.0)] * 2, False),  # was as silent before
    ([HEARD, replace(HEARD, state=ThreadState.STOPPED)], True),
    ([HEARD, replace(HEARD, ended=ExitKind.KILLED)], True),
    ([HEARD, replace(HEARD, ended=ExitKind.FAILED)], True),
    ([HEARD, replace(HEARD, ended=ExitKind.ENDED)], False),
    ([SILENT, replace(HEARD, ended=ExitKind.ENDED)], True),
    ([replace(SILENT, ended=ExitKind.KILLED)], False),  # nobody is left to wait
    ([], False),
])  # fmt: skip
def test_suspicious(ranks: list[RankState], expected: object) -> None:
    """All who live are silent for longer than is usual, or one is stopped or has failed."""
    assert suspicious(ranks) is expected


@pytest.mark.parametrize(("ranks", "quiet"), [
    ([replace(SILENT, bound=10.0, silence=20.1)], True),
    ([replace(SILENT, bound=10.0, silence=19.9)], False),
    ([replace(SILENT, bound=50.0, silence=25.1)], True),
    ([replace(SILENT, bound=50.0, silence=24.9)], False),
    ([replace(SILENT, silence=20.1, ended=ExitKind.ENDED)], False),
])  # fmt: skip
def test_quiet(ranks: list[RankState], *, quiet: bool) -> None:
    """For half of what is usual, and for 20 s at least."""
    assert _is_quiet(ranks) is quiet


def test_each_suspicion_is_told_twice() -> None:
    """At once and after a while, and anew only once it was over; one job is not another."""
    suspicions, told = Suspicions(), []
    for now in range(60):
        silent = SILENT if now not in range(30, 33) else HEARD
        jobs = {"a": [silent], "b": [HEARD], "c": [SILENT if now >= 10 else HEARD]}
        told += [(job, now) for job in suspicions.due(jobs, float(now))]
    again = 5
    assert [now for job, now in told if job == "a"] == [0, again, 33, 33 + again]
    assert [now for job, now in told if job == "c"] == [10, 10 + again]
    assert {job for job, _ in told} == {"a", "c"}
