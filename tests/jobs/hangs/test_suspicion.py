"""Which jobs are suspected to hang, and how often each suspicion is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dshealthd.jobs.hangs.detector import Suspicions, suspicious
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.states import RankState
from dshealthd.linux.activity import ThreadState
from tests.jobs.standstills import rank_state

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
