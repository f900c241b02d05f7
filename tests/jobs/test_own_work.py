"""Windows of steps, and figures of own work: exact, in step with other ranks, without news none."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from dshealthd.jobs.own_work import (
    PAUSES,
    SCALES,
    Course,
    NodeRanks,
    RankFigures,
    Slow,
    compare_ranks,
    figures_of,
    level,
    slow_ranks,
    slow_ratio_of,
)
from dshealthd.training.message import Message, Totals

KNOWN = 10
PRIOR = 0.015**2
WINDOWS = 8


def course(
    works: list[float], *, every: int = 1, wait: float = 0.5, before: int = 0
) -> tuple[Course, float]:
    """Return the course of a rank with this own work in each step, of which each `every`th is read;
    and when the last was.
    """
    made = Course()
    sums = itertools.accumulate(works, initial=0.0)
    now = 0.0
    for step, work in enumerate(sums):
        now = work + step * wait
        if step % every == 0:
            totals = Totals(before + step, step, work, step * wait)
            made.add(Message(step=before + step, sent=now, totals=totals), now)
    return made, now


def test_windows_are_exact_and_shared() -> None:
    """Windows begin at multiples of their length, whichever step the agent saw first."""
    works = [float(step) for step in range(1, 61)]
    early, _ = course(works)
    late, _ = course(works[3:], before=3)
    assert early.number(2, 0.0) == late.number(2, 0.0) == 15
    windows = early.windows(2, 15)
    assert windows == [4 * number + 2.5 for number in range(7, 15)]
    assert late.windows(2, 15) == windows
    assert early.windows(3, 7) is None  # not yet eight of them
    assert early.shares(2) == pytest.approx((sum(works[28:]) / 32, 0.5))


def test_windows_that_end_between_two_reads() -> None:
    """What passed between two reads counts for the windows in equal parts; of windows that are much
    shorter, none is known.
    """
    made, _ = course([1.0, 2.0, 3.0] * 40, every=3)
    assert made.windows(2, 29) == pytest.approx([2.0] * WINDOWS, rel=0.06)
    gone, _ = course([1.0] * 160, every=16)
    assert gone.windows(0, 160) is None
    assert gone.windows(2, 40) == [1.0] * WINDOWS


def test_a_course_that_begins_anew() -> None:
    """A training that goes back to an earlier step, as after a restore, starts with no windows."""
    made, now = course([1.0] * 40)
    assert made.windows(1, 20) is not None
    made.add(Message(step=10, sent=now, totals=Totals(10, 41, 41.0, 0.0)), now)
    assert made.number(1, 0.0) is None
    assert made.shares(1) is None


def test_levels() -> None:
    """A window is the power of two of steps that is closest to its time, one step at least; eight
    where its parts are told apart.
    """
    steps = (60.0, 4.0, 2.0, 0.5, 0.001, 0.0)
    assert [level("30s", step) for step in steps] == [0, 0, 1, 3, 12, 15]
    assert [level(PAUSES, step) for step in steps] == [3, 3, 4, 6, 15, 15]
    assert [level(over, 1.0) for over in ("2m", "5m")] == [4, 5]


def test_work_without_new_steps_is_none() -> None:
    """In a hung job nobody is slow, whatever the last windows say; nor is a rank that stopped
    making steps compared with others.
    """
    slow, ended = course([2.0] * 40, wait=0.0)
    usual, _ = course([1.0] * 40, wait=1.0)
    both = {0: usual, 1: slow}
    found = compare_ranks(both, "30s", 1, ended - 5.0)
    assert found is not None
    assert found.rank == 1
    assert found.slow == pytest.approx(2.0)
    assert found.usual == pytest.approx(1.0)
    assert compare_ranks(both, "30s", 1, ended + 1.0) is None


@pytest.mark.parametrize(("steps", "usual"), [(40, 9 ** (1 / 8)), (39, 1.0), (30, 1.0)])
def test_one_rank_s_page_is_read_before_its_step(steps: int, usual: float) -> None:
    """A window that only some ranks have ended yet is left for the next time."""
    works = [1.0] * 38 + [9.0] * 2
    ahead, behind = course(works)[0], course(works[:steps])[0]
    found = compare_ranks({0: ahead, 1: behind}, "30s", 1, 0.0)
    assert found is not None
    assert found.usual == pytest.approx(usual)


def logs(*works: list[float]) -> dict[int, list[float]]:
    """Return the logarithms of work by rank and window."""
    return {rank: [math.log(value) for value in work] for rank, work in enumerate(works)}


def test_the_same_rank_is_slow() -> None:
    """A rank that is slow in all windows is slow; one that pauses in two of them is not, however
    long, nor are ranks that are slowest in turn.
    """
    usual = [1.0] * WINDOWS
    assert figures_of(logs(usual, usual, [1.3] * WINDOWS, usual)).slow == pytest.approx(1.3)
    pauses = [5.0] * 2 + [1.0] * (WINDOWS - 2)
    assert figures_of(logs(usual, usual, pauses, usual)).slow == pytest.approx(1.0)
    turns = [[3.0 if window % 4 == rank else 1.0 for window in range(WINDOWS)] for rank in range(4)]
    found = figures_of(logs(*turns))
    assert found.slow == pytest.approx(1.0)
    assert found.within > 0.01


def test_differences_are_constant_or_random() -> None:
    """What lasts shows between a node's other ranks, what each window changes within them, too."""
    dice = random.Random(1)
    constant = figures_of(logs(*([1 + 0.1 * rank] * WINDOWS for rank in range(8))))
    assert constant.between == pytest.approx(0.2**2, rel=0.3)
    assert constant.within == pytest.approx(0.0, abs=1e-12)
    noise = figures_of({rank: [dice.gauss(0.0, 0.1) for _ in range(WINDOWS)] for rank in range(8)})
    assert noise.within == pytest.approx(0.1**2 / WINDOWS, rel=0.5)
    assert noise.between == pytest.approx(0.1**2 / WINDOWS, rel=2.0)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_what_ranks_differ_by(ranks: int) -> None:
    """The median of what a node's ranks show is right, although the slowest does not count."""
    dice = random.Random(ranks)
    found = [
        figures_of({rank: [dice.gauss(0.0, 0.1)] * WINDOWS for rank in range(ranks)}).between
        for _ in range(500)
    ]
    assert statistics.median(found) == pytest.approx(0.01, rel=0.2)


def test_the_only_rank_of_a_role() -> None:
    """Nothing here tells its pauses from what all ranks do then: its lower windows count."""
    found = figures_of(logs([1.0] * 4 + [1.5] * 4))
    assert found.slow == pytest.approx(1.0)
    assert found.usual == pytest.approx(math.sqrt(1.5))
    assert figures_of(logs([1.2] * WINDOWS)).slow == pytest.approx(1.2)


def test_of_a_pair_the_faster_is_usual() -> None:
    """Of two ranks one may be slow, so the other is usual."""
    found = figures_of(logs([2.0] * WINDOWS, [1.0] * WINDOWS))
    assert found.rank == 0
    assert found.usual == pytest.approx(1.0)
    assert found.between == pytest.approx(math.log(2) ** 2)


@pytest.mark.parametrize(("ranks", "between", "within", "slow", "healthy"), [
    (1024, 0.005, 0.0, 1.04, 1.03),
    (1024, 0.05, 0.0, 1.37, 1.34),
    (1024, 0.0, 0.04, 1.3, 1.29),
    # What few ranks show may be small by chance: what is known before counts as ten others.
    (2, 0.2, 0.0, 1.24, 1.22),
    (3, 0.0, 0.0, 1.18, 1.16),
    (4, 0.01, 0.0, 1.18, 1.16),
    (4, 0.04, 0.0, 1.28, 1.25),
    (4, 0.08, 0.0, 1.48, 1.44),
    (8, 0.01, 0.0, 1.14, 1.11),
    (8, 0.05, 0.0, 1.35, 1.32),
    (64, 0.01, 0.0, 1.08, 1.06),
    # As much as random differences show between ranks is not counted twice.
    (64, 0.049, 0.04, 1.31, 1.29),
    (64, 0.06, 0.04, 1.42, 1.37),
])  # fmt: skip
def test_limit(ranks: int, between: float, within: float, slow: float, healthy: float) -> None:
    """A few per cent show where many ranks are alike; what few ranks show must be more."""
    assert healthy < slow_ratio_of(ranks, between**2, within**2) < slow


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64, 1024])
def test_one_false_name_in_720_000_hours(ranks: int) -> None:
    """What ranks show of lasting differences counts as Student's t does, with one false name a
    month in 1,000 jobs.
    """
    freedom = KNOWN + ranks - 2
    beyond = student_above(
        math.log(slow_ratio_of(ranks, PRIOR, 0.0)) / deviation_from_others(ranks), freedom
    )
    assert 0.5 < beyond * 720_000 * ranks < 2


def deviation_from_others(ranks: int) -> float:
    """Return the deviation of one rank from the mean of the others, each of which has PRIOR."""
    return math.sqrt(PRIOR * ranks / (ranks - 1))


def student_above(t: float, freedom: int) -> float:
    """Return how much of Student's distribution lies above t, by its integral over the angle whose
    tangent is t / sqrt(freedom).
    """
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(
        math.pi
    )
    begin, parts = math.atan(t / math.sqrt(freedom)), 20_000
    width = (math.pi / 2 - begin) / parts
    heights = (math.cos(begin + (part + 0.5) * width) ** (freedom - 1) for part in range(parts))
    return factor * width * sum(heights)


def test_limit_of_pauses() -> None:
    """Pauses have no constant differences that are usual, however few ranks show them."""
    assert slow_ratio_of(2, 0.0, 0.004**2, prior=0.0) == pytest.approx(math.exp(6.5 * 0.004))


def pausing(windows: set[int], every: int = 1) -> dict[int, Course]:
    """Return four ranks in 144 steps of which each works for a second, and some per cent more by
    its number, and waits for half a second or for whoever pauses: rank 2 does so for 4 s in one
    step of some of the windows of 16 steps.
    """
    found = {}
    for rank in range(4):
        made = Course()
        own = wait = 0.0
        for step in range(1, 145):
            pause = 4.0 if step % 16 == 6 and step // 16 - 1 in windows else 0.0
            own += 1.0 + 0.01 * rank + (pause if rank == 2 else 0.0)
            wait += 0.5 - 0.01 * rank + (0.0 if rank == 2 else pause)
            if step % every == 0:
                message = Message(step=step, sent=0.0, totals=Totals(step, step, own, wait))
                made.add(message, float(step))
        found[rank] = made
    return found


@pytest.mark.parametrize(("windows", "slow"), [({0, 1, 3, 4, 6}, 1.0), ({0, 1, 3, 4}, 0.0)])
def test_pauses(windows: set[int], slow: float) -> None:
    """A rank that pauses in five of eight windows adds that to its steps, whatever its constant
    differences; in four, it may be chance.
    """
    courses = pausing(windows)
    found = compare_ranks(courses, PAUSES, 4, 0.0)
    assert found is not None
    pauses = 4.0 * len(windows) / 128
    if slow:
        assert found.rank == 2
        assert found.slow / found.usual == pytest.approx(1 + pauses / (1.5 + pauses), rel=0.01)
    else:
        assert found.slow / found.usual == pytest.approx(1.0, abs=1e-6)
    assert found.usual == pytest.approx(1.5 + pauses, rel=0.01)
    assert found.between < 1e-6
    assert compare_ranks(courses, PAUSES, 2, 0.0) is None  # four steps have no eighths


def test_pauses_that_no_read_resolves() -> None:
    """Where a read ends several of the eighths at once, their median is not known."""
    courses = pausing(set(), every=8)
    assert compare_ranks(courses, "5m", 3, 0.0) is not None
    assert compare_ranks(courses, PAUSES, 3, 0.0) is None


def part(node: str, slow: float, usual: float = 1.0, role: str = "", ranks: int = 8) -> NodeRanks:
    """Return what a node tells of ranks that differ by 1 %, in steps of 2 s."""
    figures = RankFigures(3, slow, usual, 0.01**2, 0.004**2)
    return NodeRanks(node, role, "30s", ranks, 2.0, figures)


def test_nodes_are_compared() -> None:
    """A rank is slow beside those of all nodes; all ranks of a node are slow beside another node's,
    which it cannot see itself.
    """
    assert slow_ranks([part("a", 1.3, 1.3)]) == []
    (found,) = slow_ranks([part("a", 1.3, 1.3), part("b", 1.02)])
    assert (found.node, found.rank) == ("a", 3)
    assert found.ratio == pytest.approx(1.3)
    assert found.loss == pytest.approx(0.15)
    many = [part(f"n{number}", 1.02) for number in range(7)]
    assert [one.node for one in slow_ranks([*many, part("a", 1.3)])] == ["a"]


def test_two_ranks_of_a_role_on_one_node() -> None:
    """Of a pair, the difference is no measure of what is usual: 1.25 times is slow, 1.2 is not."""
    for ratio, slow in ((1.25, True), (1.2, False)):
        found = figures_of(logs([ratio] * WINDOWS, [1.0] * WINDOWS))
        assert bool(slow_ranks([NodeRanks("a", "stage 0", "30s", 2, 2.0, found)])) == slow


def pairs(*works: float) -> list[Slow]:
    """Return the slow ranks of a role whose four ranks, two on each node, take so long."""
    ranks = [[ratio] * WINDOWS for ratio in works]
    return slow_ranks(
        [
            NodeRanks(node, "", "30s", 2, 2.0, figures_of(logs(*ranks[first : first + 2])))
            for node, first in (("a", 0), ("b", 2))
        ]
    )


def test_two_pairs() -> None:
    """Of four ranks on two nodes the three others show what is usual; both of one node are slow if
    neither pair differs.
    """
    for works in ((1.01, 1.3, 1.0, 0.99), (0.99, 1.0, 1.01, 1.3)):
        (found,) = pairs(*works)
        assert found.ratio == pytest.approx(1.3, rel=0.02)
    (found,) = pairs(1.3, 1.29, 1.0, 0.99)
    assert found.node == "a"
    # As others differ by as much, it may be their nature.
    assert pairs(1.0, 1.3, 1.1, 0.95) == []
    assert pairs(1.15, 1.3, 1.0, 0.95) == []


def test_unequal_work_accuses_nobody() -> None:
    """Where a quarter of the nodes and more have a rank with more work, that is its nature."""
    parts = [part(f"n{number}", 1.3 if number < 3 else 1.02) for number in range(8)]
    assert slow_ranks(parts) == []


def test_who_holds_up_the_job() -> None:
    """A slow stage beside one with more to do is slow, and costs nothing; the second slowest rank
    costs what the slowest leaves.
    """
    stages = [
        *(part("a", 1.0, role="stage 0", ranks=1), part("b", 1.5, 1.5, "stage 0", 1)),
        *(part("a", 2.0, 2.0, "stage 1", 1), part("b", 2.0, 2.0, "stage 1", 1)),
    ]
    (found,) = slow_ranks(stages)
    assert (found.node, found.role) == ("b", "stage 0")
    assert found.loss <= 0.0
    many = [part(f"n{number}", 1.02) for number in range(14)]
    first, second = slow_ranks([*many, part("a", 1.5), part("b", 1.3)])
    assert first.loss == pytest.approx(0.25)
    assert second.loss == pytest.approx(0.05, abs=1e-9)


def test_whatever_ranks_claim() -> None:
    """Seconds that no training has, as a hostile one may send, make figures or none."""
    large, _ = course([1e300] * 40)
    small, _ = course([1e-300] * 40)
    found = compare_ranks({0: large, 1: small, 2: small, 3: large}, "30s", 1, 0.0)
    assert found is not None
    assert all(
        one.ratio > one.limit for one in slow_ranks([NodeRanks("a", "", "30s", 4, 1.0, found)])
    )
    made = Course()
    for step in range(0, 2**50, 2**44):
        totals = Totals(step, step, step * 1e300, 0.0)
        made.add(Message(step=step, sent=0.0, totals=totals), float(step))
    assert all(
        compare_ranks({0: made}, over, size, 0.0) is None for over in SCALES for size in (3, 15)
    )
