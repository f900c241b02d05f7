"""Which ranks get series where there are more than places."""

from __future__ import annotations

from dataclasses import replace

from dshealthd.collectors.job_hang import MAX_RANKS, shown
from dshealthd.jobs.hangs.activity import ThreadState
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.hang import RankState
from dshealthd.training.message import Phase, StepStage

LIVING = RankState(
    rank=0,
    pid=100,
    start=1000,
    step=50,
    phase=Phase.TRAINING,
    stage=StepStage.BACKWARD,
    silence=1.0,
    bound=30.0,
    state=ThreadState.SLEEPING,
    user=0,
)
ENDED = replace(LIVING, ended=ExitKind.KILLED, ended_at=1.0)


def test_ended_ranks_take_no_place_of_the_living() -> None:
    """Jobs that failed within ten minutes leave the ranks of the one that runs their series."""
    failed = {
        f"failed-{number}": [replace(ENDED, rank=rank, start=number) for rank in (0, 1)]
        for number in range(MAX_RANKS)
    }
    running = {"running": [replace(LIVING, rank=rank) for rank in range(8)]}
    found = shown({**failed, **running})
    assert [rank.rank for job, rank in found if job == "running"] == list(range(8))
    assert len(found) == MAX_RANKS
    assert {job for job, _ in shown(failed)} == set(failed)
