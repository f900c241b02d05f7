"""For how long jobs do nothing, what a page says of it, and what outlives the agent."""

from __future__ import annotations

import json

import pytest

from dshealthd.collectors.gpu import ACTIVITY, POWER, POWER_LIMIT, UTILIZATION
from dshealthd.collectors.gpu_processes import RANK as GPU
from dshealthd.collectors.job_activity import (
    CHILDREN,
    CPU,
    FILES,
    SOCKETS,
    TROUBLE,
    WATCHDOG,
)
from dshealthd.collectors.job_environment import RANKS, WORLD_SIZE
from dshealthd.core import schema
from dshealthd.core.collector import Sample
from dshealthd.core.schema import SchemaError
from dshealthd.findings.idleness import Idleness, idle
from dshealthd.findings.series import Series
from dshealthd.findings.stalls import stalls

JOB = "run-1"
FORM = schema.of(Idleness)


def cpu(main: float, rank: int, others: float = 0.0) -> list[Sample]:
    """Return what a rank takes: its main thread, and the others."""
    return [CPU(main, JOB, str(rank), "main"), CPU(main + others, JOB, str(rank), "all")]


WORKS = [sample for rank in range(3) for sample in cpu(0.5, rank)]
MOVES = [FILES(0.0, JOB), SOCKETS(0.0, JOB)]
RESTS = [sample for rank in range(3) for sample in cpu(0.0, rank)]


def signs(idleness: Idleness, *samples: Sample, at: float) -> list[str]:
    """Return the reasons of what is found of a job of three ranks at a time in seconds."""
    return judged(idleness, *MOVES, *samples, at=at)


def judged(idleness: Idleness, *samples: Sample, at: float) -> list[str]:
    """Return the same where nothing says what the job moves."""
    known = (WATCHDOG(600, JOB), RANKS(3, JOB, JOB), WORLD_SIZE(3, JOB, JOB), CHILDREN(0.0, JOB))
    series = Series([*known, *samples])
    idleness.settle(series, at)
    return [sign.reason for sign in idle(series, at)]


def rested(idleness: Idleness, *samples: Sample) -> list[str]:
    """Return the reasons once the job has worked for half a minute and rested for 100 s."""
    for at in range(0, 40, 10):
        assert signs(idleness, *WORKS, at=at) == []
    for at in range(40, 130, 10):
        assert signs(idleness, *samples, at=at) == []
    return signs(idleness, *samples, at=140)


def gpu(rank: int, busy: float) -> list[Sample]:
    """Return what is known of the GPU of a rank."""
    place = str(rank), f"GPU-{rank}"
    return [
        GPU(1, JOB, str(rank), *place),
        UTILIZATION(busy, *place),
        ACTIVITY(0.0, *place),
        POWER(100.0, *place),
        POWER_LIMIT(700.0, *place, "enforced"),
    ]


def test_what_a_page_says() -> None:
    """A rank that its process accuses is named; so is the one whose GPU alone runs nothing, as a
    hint; without either, no rank is.
    """
    plain = "no rank has used CPU or GPU, nor moved data"
    assert rested(Idleness(), *RESTS) == [plain]
    gone = TROUBLE(100.0, JOB, "2", "ended", "4711")
    assert rested(Idleness(), *RESTS, gone) == ["rank 2 has ended"]
    spins = [*cpu(1.0, 0), *cpu(0.0, 1), *cpu(1.0, 2)]
    apart = f"{plain}; the GPU of rank 1 runs no kernel, those of the others wait in one"
    assert rested(Idleness(), *spins, *gpu(0, 1.0), *gpu(1, 0.0), *gpu(2, 1.0)) == [apart]
    two = [*cpu(1.0, 0), *RESTS[2:], *gpu(0, 1.0), *gpu(1, 0.0)]
    assert rested(Idleness(), *two) == [plain]
    spins[4:] = cpu(0.0, 2)
    assert rested(Idleness(), *spins, *gpu(0, 1.0), *gpu(1, 0.0), *gpu(2, 0.0)) == [plain]
    assert rested(Idleness(), *spins, *gpu(0, 0.0), *gpu(1, 0.0), *gpu(2, 0.0)) == []


def test_threads_beside_the_main_one() -> None:
    """Those that tokenize keep a job at work; a logger's do not."""
    assert rested(Idleness(), *RESTS[:4], *cpu(0.0, 2, 0.5)) == []
    assert len(rested(Idleness(), *RESTS[:4], *cpu(0.0, 2, 0.49))) == 1
    assert rested(Idleness(), *RESTS[:4], *cpu(0.01, 2)) == []
    assert len(rested(Idleness(), *RESTS[:4], *cpu(0.009, 2))) == 1


def test_what_is_not_known_is_no_rest() -> None:
    """A rank of which nothing is known may work; and the time without an agent teaches nothing."""
    assert rested(Idleness(), *RESTS[:4]) == []
    idleness = Idleness()
    for at in (0, 10, 20, 30, 40):
        assert signs(idleness, *(WORKS if at < 40 else RESTS), at=at) == []
    assert signs(idleness, *RESTS, at=129) == []
    restarted: Idleness = FORM.read(json.loads(json.dumps(FORM.write(idleness))))
    assert signs(restarted, *RESTS, at=5) == []
    assert signs(restarted, *RESTS, at=94) == []
    assert len(signs(restarted, *RESTS, at=95)) == 1


@pytest.mark.parametrize("moves", [MOVES[:1], MOVES[1:], []])
def test_what_a_job_moves_is_not_known(moves: list[Sample]) -> None:
    """It may load data all the time: no rest, and no figure of one; a rank that computes works."""
    idleness = Idleness()
    for at in range(0, 300, 10):
        assert judged(idleness, *moves, *(WORKS if at < 40 else RESTS), at=at) == []
    series = Series([WATCHDOG(600, JOB), RANKS(3, JOB, JOB), CHILDREN(0.0, JOB), *moves, *RESTS])
    idleness.settle(series, 310)
    assert not any(series("job_idle_seconds"))
    assert idleness.jobs[JOB].worked == 30.0


@pytest.mark.parametrize(("worked", "moved", "idle"), [
    (30, 1e4, True),  # what stores and loggers move
    (30, 1.1e4, False),
    (20, 0.0, False),  # what only starts has not worked for half a minute
])  # fmt: skip
def test_a_job_that_rests(worked: int, moved: float, idle: bool) -> None:  # noqa: FBT001
    """It has worked, and moves next to nothing."""
    idleness, moves = Idleness(), (FILES(moved, JOB), SOCKETS(0.0, JOB))
    for at in range(0, worked + 10, 10):
        judged(idleness, *MOVES, *WORKS, at=at)
    for at in range(worked + 10, worked + 100, 10):
        assert judged(idleness, *moves, *RESTS, at=at) == []
    assert bool(judged(idleness, *moves, *RESTS, at=worked + 110)) is idle


@pytest.mark.parametrize("document", [{"a": 1}, {"a": {"worked": -1}}, {"a": {"x": 0}}, ["a"]])
def test_a_damaged_file(document: object) -> None:
    """What an agent has not written is refused."""
    with pytest.raises(SchemaError):
        FORM.read({"jobs": document})


@pytest.mark.parametrize(("what", "says"), [
    ("stopped", "rank 2 (pid 4711) is stopped (SIGSTOP)"),
    ("killed", "rank 2 was killed (SIGKILL)"),
])  # fmt: skip
def test_a_rank_in_trouble_has_a_pid_while_it_lives(what: str, says: str) -> None:
    """Whoever is paged finds the process that is stopped; one that has ended has no pid any
    more.
    """
    series = Series([WATCHDOG(600, JOB), TROUBLE(40.0, JOB, "2", what, "4711")])
    assert [sign.reason for sign in stalls(series, 0.0)] == [says]
