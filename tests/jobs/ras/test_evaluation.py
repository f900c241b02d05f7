"""Which answers cannot be true, and which ranks of many are named."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pytest

from dshealthd.jobs.ras.evaluation import (
    JobProgress,
    RankLabel,
    by_size,
    check,
    check_change,
    lags,
    troubles,
)
from dshealthd.jobs.ras.status import (
    Communicator,
    ImpossibleAnswer,
    Lag,
    RankLocation,
    RasRankState,
    Status,
    Trouble,
)

MAX_NAMED = 8
RUNNING = RasRankState.RUNNING


def communicator(
    size: int,
    name: str = "a",
    *,
    counted: int | None = None,
    marks: Mapping[int, int] | None = None,
    behind: tuple[Lag, ...] = (),
    troubles: tuple[Trouble, ...] = (),
) -> Communicator:
    """Return one whose ranks run."""
    states = {RUNNING: size if counted is None else counted}
    return Communicator(
        name=name, size=size, states=states, marks=marks or {}, behind=behind, troubles=troubles
    )


def status(*communicators: Communicator, version: str = "2.29.7") -> Status:
    """Return an answer of a job whose rank n is on GPU n."""
    ranks = {place(rank): rank for rank in range(100)}
    return Status(version=version, communicators=communicators, ranks=ranks)


def place(gpu: int) -> RankLocation:
    """Return where the rank on a GPU is."""
    return RankLocation("192.0.2.1", gpu, gpu)


def lag(rank: int, behind: int = 1, gpu: int | None = None) -> Lag:
    """Return a rank that lags."""
    return Lag(rank, "AllReduce", behind, place(rank if gpu is None else gpu))


def fed(*answers: Status) -> JobProgress:
    """Return what is remembered after these answers."""
    progress = JobProgress()
    for answer in answers:
        progress.update(answer)
    return progress


def label(number: str, gpu: int) -> tuple[RankLabel, str]:
    """Return how a rank that lags is named."""
    return RankLabel(number, "192.0.2.1", str(gpu)), "AllReduce"


@pytest.mark.parametrize(
    ("found", "world_size", "true"),
    [
        (communicator(1), 1, True),
        (communicator(0), None, False),
        (communicator(8), 8, True),
        (communicator(9), 8, False),
        (communicator(9), None, True),
        (communicator(8, counted=8), 8, True),
        (communicator(8, counted=9), 8, False),
        (communicator(8, behind=(lag(0), lag(7))), 8, True),
        (communicator(8, behind=(lag(8),)), 8, False),
        (communicator(8, behind=(lag(-1),)), 8, False),
        (communicator(8, troubles=(Trouble(8, "dead", None),)), 8, False),
    ],
)
def test_ranks_of_a_communicator(
    found: Communicator, world_size: int | None, *, true: bool
) -> None:
    """No more than the job has, each counted once, and none that it has not."""
    with contextlib.nullcontext() if true else pytest.raises(ImpossibleAnswer):
        check(status(found), ["2.29.7"], world_size)


@pytest.mark.parametrize(
    ("version", "mapped", "true"),
    [
        ("2.29.7", ["2.29.7"], True),
        ("2.29.7", ["2.29.7+cuda12.9"], True),
        ("2.29.7", ["2.28.9", "2.29.7"], True),
        ("2.29.7", ["2.28.9"], False),
        ("2.29.7", ["2.28.9", None], True),
        ("", ["2.28.9"], True),
    ],
)
def test_version_that_answers(version: str, mapped: list[str | None], *, true: bool) -> None:
    """One that a process has mapped, if each one's is known."""
    with contextlib.nullcontext() if true else pytest.raises(ImpossibleAnswer, match="mapped"):
        check(status(communicator(8), version=version), mapped, 8)


@pytest.mark.parametrize(
    ("before", "after", "world_size", "true"),
    [
        ((8, 2), (8,), 8, True),
        ((8, 2), (2,), 8, False),
        ((8, 2), (), 8, True),
        ((2,), (2,), 8, True),
        ((8, 2), (2,), None, True),
    ],
)
def test_the_communicator_of_all_ends_last(
    before: tuple[int, ...], after: tuple[int, ...], world_size: int | None, *, true: bool
) -> None:
    """It does not vanish while others remain."""
    had, has = (status(*map(communicator, sizes)) for sizes in (before, after))
    with contextlib.nullcontext() if true else pytest.raises(ImpossibleAnswer, match="vanished"):
        check_change(had, has, world_size)


@pytest.mark.parametrize(("sizes", "other"), [(8, 0), (9, 2)])
def test_eight_sizes(sizes: int, other: int) -> None:
    """Of nine, the two smallest are one."""
    found, states = by_size(
        status(*(communicator(size, str(size)) for size in range(1, sizes + 1)))
    )
    assert len(found) == 8
    assert found["other"] == other
    assert states["other", RUNNING] == (3 if other else 0)


def test_the_furthest_behind_are_named() -> None:
    """Eight of them, of as many by their names; one in two communicators by its worst."""
    marks = {0: 1}
    many = communicator(100, marks=marks, behind=tuple(lag(rank) for rank in range(100)))
    pair = communicator(2, "b", marks=marks, behind=(lag(1, 3),))
    answer = status(many, pair)
    found = lags(answer, fed(answer, answer), 100)
    assert len(found) == MAX_NAMED
    assert list(found.values()) == [3, *[1] * (MAX_NAMED - 1)]
    assert next(rank.gpu for rank, _ in found) == "1"


def test_the_dead_are_named_first() -> None:
    """Then errors, then the silent; eight of them."""
    silent = tuple(Trouble(rank, "unresponsive", None) for rank in range(70))
    worse = Trouble(70, "internal_error", None), Trouble(71, "dead", None)
    lost = Trouble(3, "remote_error", None)
    found = troubles(status(communicator(80, troubles=(*silent, lost, *worse))), 80)
    assert len(found) == MAX_NAMED
    assert [what for _, what in found[:3]] == ["dead", "internal_error", "unresponsive"]
    assert [rank.number for rank, _ in found[:2]] == ["71", "70"]
    few = status(communicator(80, troubles=(lost, silent[5])))
    assert [what for _, what in troubles(few, 80)] == ["unresponsive", "remote_error"]


@pytest.mark.parametrize(
    ("early", "idle"),
    [((False, False), 2), ((True, False), 2), ((True, True), 1), ((False, True), 1)],
)
def test_answers_before_their_time(early: tuple[bool, bool], idle: int) -> None:
    """Only the first of them counts, as alerts use the count as elapsed time."""
    answer, progress = status(communicator(8, marks={0: 5})), JobProgress()
    found = []
    for each in (False, *early):
        progress.update(answer, early=each)
        found.append(progress.idle)
    progress.update(status(communicator(8, marks={0: 4})))
    assert (found[0], found[-1], progress.idle) == (None, idle, 0)


def test_silence_is_no_progress() -> None:
    """A rank that falls silent or comes back does not look like a job that gets on."""
    whole, less = (status(communicator(3, marks=dict.fromkeys(range(n), 5))) for n in (3, 2))
    assert fed(whole, less, whole).idle == 2


def test_new_communicator_is_no_progress() -> None:
    """A communicator that was not in the answer before is not compared."""
    first, second = communicator(2, marks={0: 5}), communicator(1, "b", marks={0: 9})
    assert fed(status(first), status(first, second)).idle == 1
    assert fed(status(first), status(second)).idle is None


def test_lagging_ranks_are_those_that_stand_still() -> None:
    """A rank that is behind while its communicator gets on is not named."""
    before, after = (
        status(communicator(3, marks={0: count}, behind=(lag(2),))) for count in (5, 7)
    )
    progress = fed(before, after)
    assert lags(after, progress, 3) == {}
    progress.update(after)
    assert lags(after, progress, 3) == {label("2", 2): 1}


def test_number_among_all_ranks() -> None:
    """A rank behind in a group has the number that it has among all, which only a communicator of
    WORLD_SIZE ranks tells; without one it is told by its host and GPU.
    """
    pair = communicator(2, marks={0: 1}, behind=(lag(1, gpu=3),))
    answer = status(pair, communicator(4, "b"))
    assert lags(answer, fed(answer, answer), 4) == {label("3", 3): 1}
    for size in (8, None):
        assert lags(answer, fed(answer, answer), size) == {label("", 3): 1}


def test_troubles_of_several_communicators() -> None:
    """A rank that is missing from several communicators is named once."""
    pair = communicator(2, "b", troubles=(Trouble(0, "unresponsive", place(1)),))
    world = communicator(3, troubles=(Trouble(1, "unresponsive", place(1)),))
    assert troubles(status(world, pair), 3) == [(label("1", 1)[0], "unresponsive")]
