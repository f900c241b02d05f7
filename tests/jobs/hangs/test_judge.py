"""What holds a job up, as far as its ranks on one node tell."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dshealthd.jobs.hangs.classes import Culprit, HangClass
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.judge import Standstill, judge
from dshealthd.jobs.hangs.states import NO_WORK, RankState, Work
from dshealthd.linux.activity import ThreadState
from dshealthd.linux.socket_waits import TERMINAL
from dshealthd.training.message import Phase, StepStage
from tests.jobs.standstills import rank_state

TIMEOUT = 600
IDLE_FOR = 45.0
NOTICE = 60.0
PATIENCE = 600.0
UNEXPLAINED = 90.0
FIRST = 100.0
FLOOR = 30.0
UNKNOWN = 1800.0

INPUT, FORWARD, BACKWARD = StepStage.INPUT, StepStage.FORWARD, StepStage.BACKWARD
WAITS = rank_state(31.0, world_size=3, cpu=0.01, thread_cpu=0.0)
HOLD = TIMEOUT - NOTICE - FLOOR
"""Seconds that ranks may be overdue while nothing is known."""
ALL = frozenset({0, 1, 2})


def changed(rank: RankState, /, **fields: Any) -> RankState:
    """Return the state of a rank with other values of these fields."""
    return replace(rank, **fields)


def ranks(**of_rank_1: object) -> list[RankState]:
    """Return three ranks that wait in the backward pass of one step, of which rank 1 differs."""
    return [WAITS, changed(WAITS, rank=1, pid=101, **of_rank_1), changed(WAITS, rank=2, pid=102)]


def found(states: list[RankState], work: Work = Work()) -> Standstill:  # noqa: B008 - immutable
    """Return the standstill of a job with these ranks."""
    still = judge("run-1", states, 1000.0, lambda: work)
    assert still is not None
    return still


@pytest.mark.parametrize(("rank_1", "reason", "culprit"), [
    ({"ended": ExitKind.FAILED, "silence": 1.0}, HangClass.PROCESS, Culprit.GONE),
    ({"phase": Phase.EVALUATION}, HangClass.DESYNC, Culprit.PAUSED),
    ({"stage": INPUT}, HangClass.INPUT, Culprit.INPUT),
    ({"stage": FORWARD}, HangClass.DESYNC, Culprit.LAGGING),
    ({"step": 49}, HangClass.DESYNC, Culprit.LAGGING),
    ({"step": 51}, HangClass.DESYNC, Culprit.AHEAD),
    ({"step": 51, "stage": INPUT}, HangClass.DESYNC, Culprit.AHEAD),
    ({"step": 49, "stage": StepStage.UNKNOWN}, HangClass.DESYNC, Culprit.LAGGING),
    # the stopped process is the cause, whatever else it was at
    (
        {
            "state": ThreadState.STOPPED,
            "stopped_for": FLOOR + 1,
            "phase": Phase.CHECKPOINT,
            "stage": INPUT,
        },
        HangClass.PROCESS,
        Culprit.STOPPED,
    ),
])  # fmt: skip
def test_the_rank_at_fault(rank_1: dict[str, object], reason: HangClass, culprit: Culprit) -> None:
    """The one rank that differs from those that wait is named, with what is wrong with it."""
    hang = found(ranks(**rank_1))
    assert (hang.reason, hang.culprits, hang.since) == (reason, ((1, culprit),), 969.0)
    assert [rank.pid for rank in hang.ranks] == [100, 101, 102]


FOURTH = {"forward_pass": 4, "forward_passes": 4}


@pytest.mark.parametrize(("others", "rank_1", "reason", "culprit"), [
    # As FSDP waits for parameters in a forward pass, of which rank 1 has not begun to compute.
    (
        {"stage": FORWARD, "forward_pass": 2},
        {"stage": BACKWARD, "forward_pass": 1},
        HangClass.DESYNC, Culprit.LAGGING,
    ),
    # As DistributedDataParallel waits in the last backward pass alone.
    ({}, {"stage": BACKWARD, "forward_pass": 2}, HangClass.DESYNC, Culprit.LAGGING),
    ({}, {"stage": INPUT, "forward_pass": 2}, HangClass.INPUT, Culprit.INPUT),
    (
        {"stage": INPUT, "forward_pass": 2},
        {"stage": FORWARD, "forward_pass": 2},
        HangClass.DESYNC, Culprit.LAGGING,
    ),
    ({"forward_pass": 2}, {"stage": FORWARD, "forward_pass": 3}, HangClass.DESYNC, Culprit.AHEAD),
    ({}, {"step": 51, "stage": INPUT, "forward_pass": 0}, HangClass.DESYNC, Culprit.AHEAD),
])  # fmt: skip
def test_accumulating_gradients(
    others: dict[str, object], rank_1: dict[str, object], reason: HangClass, culprit: Culprit
) -> None:
    """In a step with several forward passes, ranks are compared by the pass they are in."""
    states = [changed(rank, **(FOURTH | others)) for rank in ranks()]
    states[1] = changed(states[1], **rank_1)
    hang = found(states)
    assert (hang.reason, hang.culprits) == (reason, ((1, culprit),))


def test_passes_that_cannot_be_compared() -> None:
    """Where ranks have differently many forward passes in a step, the number of one says
    nothing.
    """
    states = ranks(forward_pass=2, forward_passes=6)
    states = [changed(rank, **FOURTH) if rank.rank != 1 else rank for rank in states]
    assert (found(states).reason, found(states).culprits) == (HangClass.WAITING, ())


@pytest.mark.parametrize("rank_1", [
    {"silence": 29.0},
    {"bound": 1800.0, "phase": Phase.CHECKPOINT},
    {"ended": ExitKind.ENDED, "state": ThreadState.GONE, "silence": 29.0},
])  # fmt: skip
def test_no_hang(rank_1: dict[str, object]) -> None:
    """One rank that is within its bound, and the job does not count as standing still; nor does one
    that ends, whose ranks do so one after another.
    """
    states = ranks(**rank_1)
    if "ended" in rank_1:
        states[0] = replace(states[0], silence=FLOOR - 1)
    assert judge("run-1", states, 1000.0) is None


@pytest.mark.parametrize("rank", [0, 3])
def test_a_loader_of_a_pipeline(rank: int) -> None:
    """The stage of a pipeline that loads is named: those that exchange with it are as far as they
    can be.
    """
    stages = [replace(WAITS, rank=number, pid=100 + number, world_size=4) for number in range(4)]
    stages[rank] = replace(stages[rank], stage=INPUT)
    still = found(stages)
    assert (still.reason, still.hold) == (HangClass.INPUT, 0.0)
    assert still.culprits == ((rank, Culprit.INPUT),)


def test_work_is_asked_for_only_if_needed() -> None:
    """It takes milliseconds of the agent's loop: not for each check of a job in a long step."""

    def work() -> Work:
        raise AssertionError

    assert judge("run-1", ranks(bound=240.0), 1000.0, work) is None
    assert judge("run-1", ranks(silence=29.0), 1000.0, work) is None


def test_all_have_ended() -> None:
    """A job without a process here does not stand still here."""
    assert (
        judge("run-1", [replace(rank, ended=ExitKind.FAILED) for rank in ranks()], 1000.0) is None
    )
    assert judge("run-1", [], 1000.0) is None


@pytest.mark.parametrize("rank_1", [{}, {"stage": INPUT}, {"phase": Phase.CHECKPOINT}])
def test_a_job_at_work_is_in_a_pause(rank_1: dict[str, object]) -> None:
    """While GPUs compute, NCCL launches or files grow, ranks that are silent are no hang, however
    long: they evaluate, or save, without a mark or beyond what was usual.
    """
    late = [replace(rank, silence=3 * 3600.0) for rank in ranks(**rank_1)]
    still = found(late, Work("its GPUs compute"))
    assert (still.reason, still.hold, still.is_pause) == (HangClass.WORKING, math.inf, True)
    assert not still.teaches
    assert still.explanation == "no step, but its GPUs compute"
    assert found(late).shown


BARRIER = {"stage": INPUT, "collective": "barrier", "collective_for": 31.0}
"""What is known of a rank that waits for others between two steps."""


LATE = {"silence": IDLE_FOR + 1}


@pytest.mark.parametrize(("rank_1", "reason", "culprits", "hold"), [
    ({}, HangClass.WAITING, (), UNEXPLAINED),
    ({"collective": "broadcast"}, HangClass.DESYNC, ((1, Culprit.APART),), 0.0),
    # It may have written a checkpoint until a moment ago, or does.
    ({"collective_for": 29.0}, HangClass.BETWEEN_STEPS, (), HOLD),
    ({"thread_cpu": 0.05}, HangClass.BETWEEN_STEPS, (), HOLD),
    ({"thread_cpu": None}, HangClass.BETWEEN_STEPS, (), HOLD),
    ({"collective": "", "silence": IDLE_FOR - 1}, HangClass.BETWEEN_STEPS, (), HOLD),
    ({"collective": "", "thread_cpu": 0.05}, HangClass.BETWEEN_STEPS, (), HOLD),
    ({"cpu": 1.0}, HangClass.WORKING, (), HOLD),
    # It does nothing, and the others wait for it: in an evaluation, a compiler or the like.
    ({"collective": ""}, HangClass.INPUT, ((1, Culprit.INPUT),), 0.0),
    # A rank on another node may be at work.
    ({"world_size": 4}, HangClass.COLLECTIVE, (), HOLD),
    ({"world_size": 4, "collective": ""}, HangClass.COLLECTIVE, (), HOLD),
])  # fmt: skip
def test_collectives_between_two_steps(
    rank_1: dict[str, object], reason: HangClass, culprits: object, hold: float
) -> None:
    """Ranks that all wait for others between two steps, or are idle while the rest wait, hang, as
    none is left that could be at work; the one that is idle, or waits in another collective than
    the rest, is named.
    """
    states = [
        changed(rank, **(BARRIER | LATE | (rank_1 if rank.rank == 1 else {}))) for rank in ranks()
    ]
    still = found(states)
    assert (still.reason, still.culprits, still.hold) == (reason, culprits, hold)
    assert found(states, Work("it writes files")).reason is HangClass.WORKING


@pytest.mark.parametrize(("of_all", "of_rank_1", "seconds"), [
    ({}, {}, 120),  # all wait at the same place: 90 s beyond what is usual
    ({"stage": INPUT, "thread_cpu": None}, {}, 540),  # a minute before their watchdog
    ({"stage": INPUT, "thread_cpu": None, "timeout": 7200}, {}, 600),
    ({"cpu": 1.0, "thread_cpu": 1.0, "timeout": 7200}, {}, 600),
    (BARRIER, {"collective": ""}, 45),
    (BARRIER, {"collective": "broadcast"}, 30),
])  # fmt: skip
def test_when_a_silence_is_a_hang(
    of_all: dict[str, object], of_rank_1: dict[str, object], seconds: int
) -> None:
    """Not a second before, and a second after."""
    for silence in (seconds - 1, seconds + 1):
        states = [
            changed(rank, **(of_all | {"silence": float(silence)} | of_one))
            for rank, of_one in zip(ranks(), ({}, of_rank_1, {}), strict=True)
        ]
        still = judge("run-1", states, 1000.0)
        assert (still is not None and still.shown) is (silence > seconds)


def test_so_many_culprits_are_named() -> None:
    """Eight of the nine that are stopped, where others wait."""
    held = {"state": ThreadState.STOPPED, "stopped_for": FLOOR + 1}
    states = [changed(WAITS, rank=rank, **(held if rank < 9 else {})) for rank in range(20)]
    assert [rank for rank, _ in found(states).culprits] == list(range(8))


HEALTHY: dict[str, tuple[dict[str, object], Work]] = {
    # what rank 1 is at, while the others wait for it in a collective, and what is seen of the job
    "evaluates on its GPU": ({"collective": ""}, Work("its GPUs compute")),
    "evaluates on CPUs": ({"collective": "", "cpu": 2.0, "thread_cpu": 1.0}, NO_WORK),
    "tokenizes in other threads": ({"collective": "", "cpu": 3.0}, NO_WORK),
    "waits for its data loaders": ({"collective": ""}, Work(computes=True)),
    "compiles again": ({"collective": "", "cpu": 1.0, "thread_cpu": 1.0}, NO_WORK),
    "writes a checkpoint": ({"collective": ""}, Work("it reads or writes files")),
    "uploads one": ({"collective": ""}, Work("it sends or receives over the network")),
    "gathers a large tensor": ({}, Work("it sends or receives over the network")),
    "gets no CPU": ({"collective": "", "cpu": 0.9}, NO_WORK),
    "waits for a service's rollouts": ({"collective": ""}, Work(awaits={1: "10.0.0.7:80"})),
    "runs at some percent": ({"collective": "", "thread_cpu": 0.03}, NO_WORK),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_ranks_that_others_wait_for(name: str) -> None:
    """A rank that is at work, or may be, while the others wait for it in a collective is no hang,
    and none is named.
    """
    rank_1, seen = HEALTHY[name]
    states = [
        changed(rank, **(BARRIER | LATE | (rank_1 if rank.rank == 1 else {}))) for rank in ranks()
    ]
    still = found(states, seen)
    assert (still.is_pause, still.culprits) == (True, ())


SAVES = {
    "phase": Phase.CHECKPOINT,
    "stage": INPUT,
    "silence": FIRST + 1,
    "bound": UNKNOWN,
    "idle_bound": FIRST,
}
"""What is known of a rank in the first marked checkpoint of a job."""
SAVED = SAVES | {"collective": "barrier", "collective_for": FIRST}
"""The same of one that has written its part, and waits for others."""


def saving(**of_rank_1: object) -> list[RankState]:
    """Return three ranks in a checkpoint, of which all but rank 1 wait in a barrier."""
    return [changed(rank, **(SAVES | of_rank_1 if rank.rank == 1 else SAVED)) for rank in ranks()]


def test_a_checkpoint_in_which_nobody_works() -> None:
    """A rank that neither moves bytes nor computes in a checkpoint, while the others wait for it,
    is a hang as soon as one in the first steps, and named alone; those that have all written hang
    together.
    """
    still = found(saving())
    assert (still.reason, still.culprits, still.hold, still.overdue) == (
        HangClass.CHECKPOINT, ((1, Culprit.CHECKPOINT),), 0.0, 1.0,
    )  # fmt: skip
    assert still.teaches
    late = found(saving(silence=UNKNOWN + 1))
    assert late.culprits == ((1, Culprit.CHECKPOINT),)
    still = found(saving(**SAVED))
    assert (still.reason, still.culprits, still.hold) == (HangClass.WAITING, (), UNEXPLAINED)
    trains = changed(WAITS, stage=INPUT, bound=FLOOR, **LATE)
    others = [changed(trains, rank=0, **BARRIER), saving()[1], changed(trains, rank=2, **BARRIER)]
    assert found(others).culprits == ((1, Culprit.CHECKPOINT),)
    still = found([replace(rank, world_size=4) for rank in others])
    assert (still.reason, still.hold) == (HangClass.COLLECTIVE, UNKNOWN - FIRST)


@pytest.mark.parametrize(
    ("rank_1", "reason"),
    [({}, HangClass.COLLECTIVE), (SAVED, HangClass.COLLECTIVE)],
)
def test_a_checkpoint_of_ranks_on_other_nodes(rank_1: dict[str, object], reason: HangClass) -> None:
    """A node that sees some of the ranks names none, and shows a hang by itself as late as ever:
    others may be at work. What the rules make of it is in tests/symptoms/training-hang-job.yml.
    """
    here = [replace(rank, world_size=4) for rank in saving(**rank_1)]
    still = found(here)
    assert (still.reason, still.culprits, still.is_pause) == (reason, (), True)
    assert still.hold == UNKNOWN - FIRST
    assert still.teaches
    alone = found([here[1]]) if not rank_1 else None
    assert alone is None or alone.reason is HangClass.IDLE
    on_gpus = [replace(rank, on_gpu=True) for rank in here]
    waits = Work(still=ALL, waits=ALL)
    assert found(on_gpus, waits).reason is HangClass.COLLECTIVE


SLOW: dict[str, tuple[dict[str, object], Work]] = {
    # what rank 1 is at in its checkpoint, and what is seen of the job
    "writes": ({}, Work("it reads or writes files")),
    "uploads": ({}, Work("it sends or receives over the network")),
    "copies from its GPU": ({}, Work("its GPUs compute")),
    "may copy from its GPU": ({"on_gpu": True}, NO_WORK),
    "flushes": ({"state": ThreadState.BLOCKED}, NO_WORK),
    "flushes in another thread": ({"stores": True}, NO_WORK),
    "serializes": ({"thread_cpu": 0.05}, NO_WORK),
    "compresses in other threads": ({"cpu": 3.0}, NO_WORK),
    "compresses in other processes": ({}, Work(computes=True)),
    "waits for an object store": ({}, Work(awaits={1: "10.0.0.7:80"})),
    "has just begun": ({"silence": FIRST - 1}, NO_WORK),
    "is in one that is as slow each time": ({"idle_bound": 400.0}, NO_WORK),
    "evaluates by a service": ({"phase": Phase.EVALUATION, "idle_bound": UNKNOWN}, NO_WORK),
    "computes in an evaluation": ({"stage": FORWARD}, NO_WORK),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_checkpoints(name: str) -> None:
    """A rank that is at work, or may be, in a marked phase has the time that phases take."""
    rank_1, seen = SLOW[name]
    assert judge("run-1", saving(**rank_1), 1000.0, lambda: seen) is None


def test_an_upload_by_one_rank() -> None:
    """Rank 0 sends a checkpoint to an object store while the others, on its node and on another,
    wait on their GPUs: its node shows a job at work while the bytes move, and then one that hangs
    unless the other is at work. What the rules make of it is in
    tests/symptoms/training-hang-job.yml.
    """
    rank = changed(WAITS, stage=INPUT, on_gpu=True, world_size=4, **LATE)
    here, there = ([replace(rank, rank=number) for number in node] for node in ((0, 1), (2, 3)))
    sends = Work("it sends", still=frozenset({0, 1}), waits=frozenset({1}))
    assert (found(here, sends).reason, found(here, sends).waiting) == (
        HangClass.WORKING,
        {1: "kernel"},
    )
    stuck = sends._replace(says="")
    assert (found(here, stuck).reason, found(here, stuck).shown) == (HangClass.COLLECTIVE, False)
    waits = found(there, Work(still=frozenset({2, 3}), waits=frozenset({2, 3})))
    assert (waits.reason, waits.hold, waits.waiting) == (
        HangClass.WAITING,
        UNEXPLAINED,
        {2: "kernel", 3: "kernel"},
    )


def test_rollouts_that_take_as_long_each_time() -> None:
    """Ranks that wait idly for a service that generates for three minutes are no hang once that is
    usual, and an asynchronous checkpoint makes none silent.
    """
    states = [changed(rank, **BARRIER, bound=360.0) for rank in ranks()]
    states = [replace(rank, silence=200.0) for rank in states]
    states[0] = replace(states[0], collective="")
    assert judge("run-1", states, 1000.0) is None
    assert judge("run-1", ranks(silence=0.4), 1000.0) is None


def test_idle_ranks_alone() -> None:
    """Ranks that are all idle between two steps wait for something else than each other."""
    idle = [replace(rank, stage=INPUT, silence=IDLE_FOR + 1) for rank in ranks()]
    still = found(idle)
    assert (still.reason, still.hold, still.is_pause) == (HangClass.IDLE, HOLD, True)
    for late in ([replace(rank, silence=PATIENCE + 1) for rank in idle[:n]] for n in (1, 2, 3)):
        still = found(late)
        assert still.shown
        assert still.explanation == "its ranks here are between two steps, and in no collective"


def test_a_rank_whose_gpu_does_nothing() -> None:
    """Of ranks whose hosts are between two steps, the one whose GPU runs no kernel is waited for by
    those whose GPUs wait in one, if its host does nothing; with other nodes, which may be at work,
    none is named.
    """
    states = [changed(rank, stage=INPUT, on_gpu=True, cpu=1.0, **LATE) for rank in ranks()]
    states[1] = replace(states[1], cpu=0.0)
    seen = Work(still=ALL, waits=frozenset({0, 2}))
    assert (found(states, seen).reason, found(states, seen).culprits) == (
        HangClass.INPUT,
        ((1, Culprit.INPUT),),
    )
    busy = [states[0], replace(states[1], cpu=1.0), states[2]]
    assert found(busy, seen).reason is HangClass.WORKING
    part = [replace(rank, world_size=4) for rank in states]
    assert found(part, seen).reason is HangClass.COLLECTIVE


def test_collectives_without_a_majority() -> None:
    """Of two ranks in two collectives, none is named."""
    two = [
        changed(WAITS, rank=rank, world_size=2, **(BARRIER | {"collective": collective}))
        for rank, collective in enumerate(("barrier", "broadcast"))
    ]
    assert (found(two).reason, found(two).culprits) == (HangClass.DESYNC, ())


def test_patience_with_who_computes_ends() -> None:
    """A rank that computes on CPUs without ever making a step is a hang as well, later: a loop that
    does not end computes too. On a GPU, where waiting takes a core, CPU time shows nothing.
    """
    computes = [replace(WAITS, cpu=1.0, silence=30.0 + HOLD - 1)]
    assert (found(computes).reason, found(computes).hold) == (HangClass.WORKING, HOLD)
    assert found([replace(WAITS, cpu=1.0, silence=30.0 + HOLD)]).shown
    assert found(computes, Work(waits=frozenset({0}))).reason is HangClass.WAITING
    assert not found([replace(WAITS, cpu=1.0, on_gpu=True)]).is_pause


@pytest.mark.parametrize(
    ("timeout", "silence"),
    [
        *((TIMEOUT, 540.0), (300, 240.0), (1800, PATIENCE), (120, 60.0), (91, 31.0)),
        (90, FLOOR + UNEXPLAINED),
    ],
)
def test_patience_ends_before_the_watchdog(timeout: int, silence: float) -> None:
    """A hang is shown before a collective's time-out ends the job, even one without a cause here; a
    time-out within the usual silence is of something else.
    """
    states = [replace(rank, stage=INPUT, thread_cpu=0.05, timeout=timeout) for rank in ranks()]
    assert found(states).hold == found(states).patience == silence - 30.0
    waits = [replace(rank, timeout=timeout) for rank in ranks()]
    assert (found(waits).reason, found(waits).hold) == (
        HangClass.WAITING,
        min(UNEXPLAINED, silence - 30.0),
    )


FIRST_STEP = {"settled": False, "bound": FIRST, "silence": FIRST + 1, "step": 2}


@pytest.mark.parametrize(("of_all", "rank_1", "reason", "hold"), [
    ({}, {"stage": INPUT}, HangClass.INPUT, 0.0),
    ({}, {}, HangClass.WAITING, UNEXPLAINED),
    # It compiles, in its own process or in others, while the others wait or do the same.
    ({}, {"stage": INPUT, "cpu": 1.0, "thread_cpu": 1.0}, HangClass.WORKING, 540.0 - FIRST),
    ({"cpu": 1.0, "thread_cpu": 1.0}, {}, HangClass.WORKING, UNKNOWN - FIRST),
    # On a device that shows nothing it may compile as well.
    ({"on_gpu": True}, {"stage": INPUT}, HangClass.STARTING, 540.0 - FIRST),
    ({"thread_cpu": 0.05}, {"stage": INPUT}, HangClass.STARTING, 540.0 - FIRST),
])  # fmt: skip
def test_the_first_steps(
    of_all: dict[str, object], rank_1: dict[str, object], reason: HangClass, hold: float
) -> None:
    """Ranks at different places hang in the first steps as in any, once nobody works; one that
    compiles for minutes does not hang.
    """
    states = [changed(rank, **(FIRST_STEP | of_all)) for rank in ranks()]
    states[1] = changed(states[1], **rank_1)
    still = found(states)
    assert (still.reason, still.hold) == (reason, hold)


@pytest.mark.parametrize(("rank_1", "reason"), [
    ({"state": ThreadState.STOPPED, "stopped_for": FLOOR + 1}, HangClass.PROCESS),
    ({"state": ThreadState.TRACED, "stopped_for": FLOOR + 1}, HangClass.DEBUGGER),
    ({"ended": ExitKind.KILLED, "ended_at": 1000.0 - FLOOR - 1}, HangClass.PROCESS),
])  # fmt: skip
def test_no_pause_explains_a_stopped_rank(rank_1: dict[str, object], reason: HangClass) -> None:
    """A rank that is stopped or has failed is named after the floor, although all are in a marked
    pause that may take half an hour; GPUs that still compute do not change that.
    """
    pause = {"phase": Phase.EVALUATION, "bound": UNKNOWN}
    states = [changed(rank, **pause) for rank in ranks(**rank_1)]
    still = found(states, Work("its GPUs compute"))
    assert (still.reason, [rank for rank, _ in still.culprits]) == (reason, [1])
    assert judge("run-1", [replace(states[0], silence=FLOOR - 1), *states[1:]], 1000.0) is None
    just = replace(states[1], stopped_for=FLOOR - 1, ended_at=1000.0 - FLOOR + 1)
    assert judge("run-1", [states[0], just, states[2]], 1000.0) is None


def test_a_debugger_is_no_hang() -> None:
    """The owner's debugger is reported with its rank; reading a stack for evidence is none."""
    traced = {"state": ThreadState.TRACED}
    still = found(ranks(**traced, stopped_for=FLOOR + 1))
    assert (still.reason, still.is_pause) == (HangClass.DEBUGGER, True)
    assert still.culprits == ((1, Culprit.TRACED),)
    assert found(ranks(**traced, stopped_for=1.0)).reason is HangClass.WAITING


@pytest.mark.parametrize("rank_1", [{"stage": INPUT}, {"stage": FORWARD}, {}, {"step": 51}])
def test_a_prompt_is_no_hang(rank_1: dict[str, object]) -> None:
    """A rank that waits for what its user types, as at `breakpoint()`, is reported to the owner,
    wherever in a step it is, and however long that takes.
    """
    for silence in (FLOOR + 1, 3600.0):
        states = [replace(rank, silence=silence) for rank in ranks(**rank_1)]
        still = found(states, Work(awaits={1: TERMINAL}))
        assert (still.reason, still.is_pause) == (HangClass.DEBUGGER, True)
        assert still.culprits == ((1, Culprit.PROMPT),)


@pytest.mark.parametrize(("rank_1", "awaits", "reason"), [
    ({"stage": INPUT}, {1}, HangClass.BETWEEN_STEPS),
    ({"stage": INPUT}, {0}, HangClass.INPUT),  # who has begun the step is waited for by none
    ({"stage": FORWARD}, {1}, HangClass.DESYNC),
    ({"step": 51, "stage": INPUT}, {1}, HangClass.DESYNC),  # ahead of those that wait
    ({"stage": INPUT, "phase": Phase.CHECKPOINT}, {1}, HangClass.CHECKPOINT),
    ({"stage": INPUT, "state": ThreadState.BLOCKED}, {1}, HangClass.INPUT),
])  # fmt: skip
def test_rollouts_of_one_rank(
    rank_1: dict[str, object], awaits: set[int], reason: HangClass
) -> None:
    """A rank that waits for a service's answer between two steps, while the others have begun the
    step, is in a pause until the job's watchdog would end it; then it is named.
    """
    seen = Work(awaits=dict.fromkeys(awaits, "10.0.0.7:80"))
    still = found(ranks(**rank_1), seen)
    assert (still.reason, still.is_pause) == (reason, reason is HangClass.BETWEEN_STEPS)
    if still.is_pause:
        late = [replace(rank, silence=TIMEOUT - NOTICE + 1) for rank in ranks(**rank_1)]
        assert found(late, seen).culprits == ((1, Culprit.INPUT),)


def test_a_rank_that_goes_on_after_the_others() -> None:
    """One that computes after the others are done, as it exports the model, waits for none of
    them, however long; one that is idle then, does.
    """
    done = {"ended": ExitKind.ENDED, "ended_at": 0.0, "state": ThreadState.GONE}
    busy = changed(WAITS, stage=INPUT, cpu=1.0, thread_cpu=1.0, silence=PATIENCE + 1)
    states = [busy, *(changed(rank, **done) for rank in ranks()[1:])]
    assert judge("run-1", states, 1000.0) is None
    idle = replace(busy, cpu=0.0, thread_cpu=0.0)
    assert judge("run-1", [idle, *states[1:]], 1000.0, lambda: Work(computes=True)) is None
    assert found([idle, *states[1:]]).culprits == ((1, Culprit.GONE), (2, Culprit.GONE))


def test_a_suspended_job_is_no_hang() -> None:
    """A job whose processes are all stopped was suspended on purpose."""
    all_stopped = [replace(rank, state=ThreadState.STOPPED) for rank in ranks()]
    still = found(all_stopped)
    assert (still.reason, still.is_pause, still.teaches) == (HangClass.SUSPENDED, True, False)
    failed = replace(all_stopped[1], ended=ExitKind.FAILED, ended_at=0.0)
    assert found([all_stopped[0], failed, all_stopped[2]]).reason is HangClass.PROCESS


def test_a_job_that_is_being_suspended() -> None:
    """Its processes are stopped one after another: those that have just been are not accused."""
    paused = [replace(rank, phase=Phase.EVALUATION) for rank in ranks()]
    one = replace(paused[1], state=ThreadState.STOPPED, stopped_for=1.0)
    assert found([paused[0], one, paused[2]]).reason is HangClass.WAITING
    long = replace(one, stopped_for=FLOOR + 1)
    assert found([paused[0], long, paused[2]]).culprits == ((1, Culprit.STOPPED),)


@pytest.mark.parametrize(("stopped", "named"), [(0, []), (1, [1])])
def test_places_accuse_nobody_beside_a_rank_that_just_stopped(
    stopped: int, named: list[int]
) -> None:
    """The stop may be why the others wait: until it counts, only its own rank can be behind."""
    states = ranks(stage=FORWARD)
    assert [rank for rank, _ in found(states).culprits] == [1]
    states[stopped] = replace(states[stopped], state=ThreadState.STOPPED, stopped_for=1.0)
    assert [rank for rank, _ in found(states).culprits] == named


def test_a_kernel_that_waits_is_between_no_steps() -> None:
    """The host may have finished a step whose collective its GPU still waits in."""
    between = [replace(rank, stage=INPUT, on_gpu=True, world_size=4) for rank in ranks()]
    assert found(between).reason is HangClass.BETWEEN_STEPS
    assert found(between, Work(still=ALL, waits=ALL)).reason is HangClass.WAITING


NO_FAILURES = (ExitKind.ENDED, ExitKind.TERMINATED, ExitKind.UNKNOWN)


@pytest.mark.parametrize("how", NO_FAILURES)
def test_who_is_done_while_others_wait(how: ExitKind) -> None:
    """A rank that has ended, however, is the one that those in a step or in a collective wait
    for.
    """
    done = {"ended": how, "ended_at": 1000.0 - FLOOR - 1, "state": ThreadState.GONE}
    for others in ({}, BARRIER):
        states = [changed(rank, **others, bound=UNKNOWN) for rank in ranks()]
        states[1] = changed(states[1], **done)
        hang = found(states)
        assert (hang.reason, hang.culprits) == (HangClass.PROCESS, ((1, Culprit.GONE),))
        just = replace(states[1], ended_at=1000.0 - FLOOR + 1)
        assert judge("run-1", [states[0], just, states[2]], 1000.0) is None


def test_ranks_that_end_one_after_another() -> None:
    """One that has just ended well is no culprit, though the others are overdue by now."""
    states = [changed(rank, **BARRIER) for rank in ranks()]
    states[1] = replace(states[1], ended=ExitKind.ENDED, ended_at=995.0)
    assert judge("run-1", states, 1000.0) is None


def test_all_ranks_in_the_same_storage() -> None:
    """Where all ranks of a node hang in the kernel, all are named; of a few that do not, none is
    known.
    """
    blocked = [replace(rank, state=ThreadState.BLOCKED) for rank in ranks()]
    assert found(blocked).culprits == tuple((rank, Culprit.BLOCKED) for rank in range(3))
    most = [*blocked[:2], replace(WAITS, rank=2)]
    assert found(most).reason is HangClass.WAITING


@pytest.mark.parametrize("how", NO_FAILURES)
@pytest.mark.parametrize("others", [{"stage": INPUT}, {"thread_cpu": 0.5}, {"on_gpu": True}])
def test_an_orderly_end(others: dict[str, object], how: ExitKind) -> None:
    """Of ranks that are not known to wait for it, one may write results after another has ended
    well, or as it was asked to before a preemption, or nobody saw how: the job ends, for as long as
    nothing is known.
    """
    states = [changed(rank, **others, silence=29.0 + HOLD) for rank in ranks()]
    states[1] = replace(states[1], ended=how, ended_at=0.0)
    assert judge("run-1", states, 1000.0) is None
    late = [replace(rank, silence=31.0 + HOLD) for rank in states]
    assert found(late).culprits == ((1, Culprit.GONE),)
    assert judge("run-1", late, 1000.0, lambda: Work("it sends")) is None


def test_most_are_behind() -> None:
    """Where most wait for input and one is in the step, that one has skipped what the others wait
    in.
    """
    hang = found([replace(rank, stage=BACKWARD if rank.rank == 1 else INPUT) for rank in ranks()])
    assert (hang.reason, hang.culprits) == (HangClass.DESYNC, ((1, Culprit.AHEAD),))


@pytest.mark.parametrize(
    "rank_1",
    [{"stage": INPUT}, {"stage": FORWARD}, {"step": 49}, {"step": 51}, {"phase": Phase.EVALUATION}],
)
@pytest.mark.parametrize(("count", "world_size"), [(2, 2), (2, 4), (3, 4), (3, None)])
def test_no_rank_is_named_by_an_incomplete_comparison(
    rank_1: dict[str, object], count: int, world_size: int | None
) -> None:
    """Where as many ranks are ahead as behind, or ranks are on other nodes, none is named: the
    culprit may be any of them, and the explanation says what this node does not see.
    """
    here = [replace(rank, world_size=world_size) for rank in ranks(**rank_1)[:count]]
    hang = found(here)
    assert (hang.reason, hang.culprits, hang.hold) == (HangClass.DESYNC, (), 0.0)
    assert ("not seen from this node" in hang.explanation) == (count != world_size)


@pytest.mark.parametrize(("reason", "named", "whole", "words"), [
    (HangClass.DESYNC, True, True, "ranks are at different places"),
    (HangClass.DESYNC, False, True, "as many ahead as behind"),
    (HangClass.DESYNC, False, False, "ranks here are at different places"),
    (HangClass.WAITING, False, True, "all ranks wait at the same place"),
    (HangClass.WAITING, False, False, "a rank on another node"),
    (HangClass.SUSPENDED, True, True, "all its processes are stopped"),
    (HangClass.SUSPENDED, True, False, "all its processes here are stopped"),
    (HangClass.INPUT, True, True, "work between steps"),
])  # fmt: skip
def test_explanations(reason: HangClass, words: str, *, named: bool, whole: bool) -> None:
    """What is said of a hang is limited to what this node can know."""
    still = replace(found(ranks()), reason=reason, whole=whole)
    assert words in replace(still, culprits=((1, Culprit.LAGGING),) * named).explanation


@pytest.mark.parametrize(("rank_1", "reason", "culprit"), [
    ({"state": ThreadState.STOPPED, "stopped_for": FLOOR + 1}, HangClass.PROCESS, Culprit.STOPPED),
    ({"ended": ExitKind.KILLED, "state": ThreadState.GONE}, HangClass.PROCESS, Culprit.GONE),
    ({"state": ThreadState.BLOCKED}, HangClass.INPUT, Culprit.BLOCKED),
    ({"phase": Phase.CHECKPOINT}, HangClass.CHECKPOINT, Culprit.CHECKPOINT),
])  # fmt: skip
def test_a_process_is_evidence_by_itself(
    rank_1: dict[str, object], reason: HangClass, culprit: Culprit
) -> None:
    """What a process does names its rank, wherever the others are."""
    hang = found([replace(rank, world_size=64) for rank in ranks(**rank_1)])
    assert (hang.reason, hang.culprits) == (reason, ((1, culprit),))


@pytest.mark.parametrize(("of_all", "hold"), [
    ({"stage": INPUT}, HOLD),
    ({"stage": INPUT, "phase": Phase.EVALUATION}, UNEXPLAINED),
    ({}, UNEXPLAINED),
    ({"stage": StepStage.UNKNOWN}, UNEXPLAINED),
])  # fmt: skip
def test_what_may_be_a_pause_is_held(of_all: dict[str, object], hold: float) -> None:
    """Ranks that are all between the same two steps may write an unmarked checkpoint."""
    still = found([changed(rank, **of_all) for rank in ranks()])
    assert (still.hold, still.overdue, still.shown) == (hold, 1.0, False)
    assert still.is_pause is (hold == HOLD)
    late = [changed(rank, **of_all, silence=30.0 + HOLD) for rank in ranks()]
    assert found(late).shown
