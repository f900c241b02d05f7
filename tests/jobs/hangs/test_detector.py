"""What the detector remembers of jobs that stand still."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.environment import launch
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.detector import HangDetector
from dshealthd.jobs.hangs.states import Work
from dshealthd.jobs.heartbeats.identity import Identity
from dshealthd.jobs.heartbeats.sender import Sender
from dshealthd.jobs.options import HangOptions
from dshealthd.jobs.processes import TrainingProcess
from dshealthd.training.message import Message, StepStage
from tests.jobs.machines import TORCH

FLOOR = 30.0

JOB = "run-1"
PID = 1 << 23
"""Larger than any process has."""
STEP = 2.0


@pytest.mark.parametrize("at_work", [Work("its GPUs compute"), Work(computes=True)])
async def test_a_job_at_work_teaches_nothing(tmp_path: Path, at_work: Work) -> None:
    """A job whose GPUs or child processes compute is in a pause, also between two samples that show
    it.
    """
    place = launch({**TORCH, "RANK": "0", "WORLD_SIZE": "1"})
    assert place is not None
    process = TrainingProcess(PID, 1, 1, JOB, place, TORCH)
    (tmp_path / str(PID)).mkdir()
    fields = ["S", *["0"] * 18, "1", *["0"] * 30]
    (tmp_path / str(PID) / "stat").write_text(f"{PID} (python) {' '.join(fields)}\n")
    clock, step, work = [1000.0], [0], [Work()]
    detector = HangDetector(
        HangOptions(),
        Host(procfs=tmp_path),
        monotonic=lambda: clock[0],
        wall=lambda: clock[0],
        work=lambda _job: work[0],
    )

    def look(*, moves: bool) -> None:
        clock[0] += STEP
        step[0] += moves
        if moves:
            sent[0] = clock[0]
        message = Message(step=step[0], sent=sent[0], stage=StepStage.BACKWARD)
        sender: Any = SimpleNamespace(message=message)
        ranks = {(JOB, 0): [(Identity(process, (1, 7)), cast("Sender", sender))]}
        detector.check(ranks)

    def still(seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            look(moves=False)

    sent = [clock[0]]
    for _ in range(30):
        look(moves=True)
    work[0] = at_work
    still(FLOOR + 100.0)
    assert detector.standstills[JOB].reason is HangClass.WORKING
    work[0] = Work()
    still(26.0)
    assert detector.standstills[JOB].reason is HangClass.WORKING
    still(8.0)
    assert detector.standstills[JOB].reason is HangClass.WAITING
    look(moves=True)
    assert detector.jobs[JOB][0].bound == FLOOR
    still(FLOOR + 2 * STEP)
    assert detector.standstills[JOB].reason is HangClass.WAITING
    before = detector.jobs[JOB][0].silence
    clock[0] += 1000.0  # of which nobody knows anything: three checks' time counts
    look(moves=False)
    assert detector.jobs[JOB][0].silence - before == 6.0
    detector.close()


def test_what_is_reported() -> None:
    """Hangs, and what is one unless a rank elsewhere is at work."""
    standstills = {
        reason: SimpleNamespace(reason=reason, is_pause=reason is not HangClass.PROCESS)
        for reason in (HangClass.PROCESS, HangClass.COLLECTIVE, HangClass.WORKING)
    }
    reported: Any = HangDetector.reported
    found = [still.reason for still in reported.fget(SimpleNamespace(standstills=standstills))]
    assert found == [HangClass.PROCESS, HangClass.COLLECTIVE]
