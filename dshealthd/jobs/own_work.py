"""Own work of ranks in windows of steps, and the figures by which ranks are compared.

A rank is slow if the *same* rank takes longer than its peers again and again; that another one is
slowest in each step is the nature of uneven work. So steps are summed up in windows that all ranks
share: window k of length n is the steps [nk, nk + n). Over the last WINDOWS of them a rank's excess
is the mean of ln(its own work / the median of its node's ranks) over the windows, but at most twice
what it was in all but LOW of them: a pause or two is no persistence.

`deploy/prometheus/recording.yml` compares nodes by these figures and says when a rank is slow;
`limit` is that criterion for one node. `bench/slow_ranks.py` simulates both.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.training.message import Totals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dshealthd.training.message import Message

WINDOWS = 8
LOW = 2
"""Windows of them that may be as usual. Events that strike each rank in a share p of the windows
strike one in six of eight with 28 p^6: at p = 2 %, twice in a billion looks.
"""
SCALES = {"30s": 4.0, "1m": 9.0, "2m": 18.0, "5m": 36.0}
"""Aimed seconds of a window, by the nominal time of WINDOWS of them. The shortest tells 1.3 times
in 30 s where ranks are alike; where each step differs by a quarter, it takes the mean of 45 steps;
each window of the longest contains a pause of 3 s in every 20.
"""
LEVELS = 16
"""Lengths of windows are powers of two up to 2^15 steps, which take 30 s at 1 ms each."""
FILLED = 4
"""Most windows that one read of a page may end: more are shorter than what a read resolves."""
Z = 6.5
"""Standard deviations of what is usual from which on a rank is slow.

One ticket a month in 1,000 jobs is one in 720,000 hours. A job of 64 ranks has 1,600 windows of the
four scales in an hour, and neighboring looks share most of theirs: 2e4 independent looks at a rank
in an hour, so one in 1.5e10 may be wrong: 6.4 deviations of a normal variable.
"""
FEW, MOST = 12.0, 2.5
"""Constant differences count (1 + FEW / ranks) times, MOST at most: what few ranks show may be small
by chance, and time does not tell. `bench/slow_ranks.py` counts what that leaves. Fewer than eight
ranks are not protected as well: else 1.3 times would never show among four.
"""
SPREAD = 0.01
"""The least constant difference taken as usual: like GPUs differ by 1 % whatever they compute. So no
excess below 7 % counts, nor below 17 % of up to 8 ranks.
"""
HUGE = 700.0
"""A logarithm that no float exceeds by much: ranks may claim any seconds."""
LOSS = 0.05
"""The share of a step that a job must lose to a slow rank for a ticket, as in `thresholds.yml`."""
UNBIASED = 1.6
"""The standard deviation of normal figures relative to the median of their distances from the
middle one, without that one and the greatest.
"""

PAIR = 0.89
"""The same of a pair, by its difference."""


class Mark(NamedTuple):
    """What a rank has done by the beginning of a window."""

    number: int
    at: float
    """Monotonic time at which the agent knew."""
    steps: float
    work: float
    wait: float


class Course:
    """The windows of one rank, of all lengths, as the agent reads its heartbeats."""

    __slots__ = ("_last", "_marks")

    def __init__(self) -> None:
        """Start empty."""
        self._last: Totals | None = None
        self._marks: list[deque[Mark]] = [deque(maxlen=WINDOWS + 2) for _ in range(LEVELS)]

    def add(self, message: Message, now: float) -> None:
        """Add what a heartbeat says of the rank's steps, read at `now`, monotonic seconds."""
        last, totals = self._last, message.totals or self._averaged(message)
        self._last = totals
        if last is None or totals is None or totals.step == last.step:
            return
        if totals.step < last.step or any(map(_less, totals[1:], last[1:])):
            for marks in self._marks:
                marks.clear()
            return
        steps = totals.step - last.step
        for level, marks in enumerate(self._marks):
            ended, begun = totals.step >> level, last.step >> level
            if ended == begun:  # and so on all longer ones
                break
            if ended - begun > FILLED:
                marks.clear()
            for number in range(max(begun, ended - FILLED) + 1, ended + 1):
                # Of windows that end between two reads, what the steps between them share equally.
                share = ((number << level) - last.step) / steps
                sums = (a + share * (b - a) for a, b in zip(last[1:], totals[1:], strict=True))
                marks.append(Mark(number, now, *sums))

    def _averaged(self, message: Message) -> Totals | None:
        """Return sums of what a training tells whose package knows averages alone."""
        if message.work_seconds is None or message.wait_seconds is None:
            return None
        last = self._last or Totals(message.step, 0, 0.0, 0.0)
        steps = max(message.step - last.step, 0)
        work, wait = steps * message.work_seconds, steps * message.wait_seconds
        _, before, worked, waited = last
        return Totals(message.step, before + steps, worked + work, waited + wait)

    def number(self, level: int, oldest: float) -> int | None:
        """Return the number of the window of 2^level steps that has begun; None if it began before
        `oldest`, monotonic seconds: a rank that makes no steps has no speed.
        """
        marks = self._marks[level]
        return marks[-1].number if marks and marks[-1].at >= oldest else None

    def windows(self, level: int, number: int) -> list[float] | None:
        """Return the own work of a step in each of the WINDOWS before this one, in seconds; None if
        not all are known.
        """
        marks = [mark for mark in self._marks[level] if mark.number <= number][-WINDOWS - 1 :]
        if len(marks) <= WINDOWS or marks[-1].number - marks[0].number != WINDOWS:
            return None
        ends = zip(marks[1:], marks[:-1], strict=True)
        found = [(b.work - a.work, b.steps - a.steps) for b, a in ends]
        if not all(0 < work < math.inf and steps > 0 for work, steps in found):
            return None
        return [work / steps for work, steps in found]

    def shares(self, level: int) -> tuple[float, float] | None:
        """Return own work and wait of a step in seconds over the last windows of 2^level steps."""
        marks = list(self._marks[level])[-WINDOWS - 1 :]
        steps = marks[-1].steps - marks[0].steps if marks else 0
        if steps <= 0:
            return None
        last, first = marks[-1], marks[0]
        return (last.work - first.work) / steps, (last.wait - first.wait) / steps


def _less(one: float, other: float) -> bool:
    return one < other


def level(seconds: float, step: float) -> int:
    """Return the level of windows that take `seconds`, of steps that take `step`."""
    if step <= 0:
        return LEVELS - 1
    return min(max(round(math.log2(seconds / step)), 0), LEVELS - 1)


class RankFigures(NamedTuple):
    """Own work of a step of a node's ranks of one role, in seconds."""

    rank: int
    """The slowest."""
    slow: float
    """Its own work, as far as it is persistent."""
    usual: float
    """The median of all ranks."""
    spread: float
    """By how much the others differ constantly: the standard deviation of ln(own work)."""
    error: float
    """By how much they differ at random: the standard error of that of one rank."""


def compared(courses: Mapping[int, Course], size: int, oldest: float) -> RankFigures | None:
    """Return the figures of some ranks over their last windows of 2^size steps; None if none has
    enough of them that began after `oldest`, monotonic seconds.
    """
    begun = {rank: course.number(size, oldest) for rank, course in courses.items()}
    numbers = [number for number in begun.values() if number is not None]
    if not numbers:
        return None
    # One rank's page may have been read before its step and another's after it.
    number = max(numbers) if min(numbers) == max(numbers) else max(numbers) - 1
    works = {
        rank: [math.log(seconds) for seconds in windows]
        for rank, course in courses.items()
        if begun[rank] is not None and (windows := course.windows(size, number))
    }
    return figures(works) if works else None


def figures(works: Mapping[int, Sequence[float]]) -> RankFigures:
    """Return the figures of ranks from ln(own work) in each of their windows, one rank at least."""
    middle = [statistics.median_low(window) for window in zip(*works.values(), strict=True)]
    level = statistics.fmean(middle)
    if len(works) == 1:
        # Nothing tells its own pauses from what all ranks do then, so its lower windows count.
        rank = next(iter(works))
        slow = min(level, sorted(middle)[LOW])
        return RankFigures(rank, math.exp(slow), math.exp(level), 0.0, _error(middle))
    excess = {
        rank: [own - usual for own, usual in zip(work, middle, strict=True)]
        for rank, work in works.items()
    }
    means = {rank: statistics.fmean(values) for rank, values in excess.items()}
    lasting = {rank: min(means[rank], 2 * sorted(values)[LOW]) for rank, values in excess.items()}
    slowest = max(lasting, key=lasting.__getitem__)
    usual = statistics.median_low(means.values())
    error = statistics.median(map(_error, excess.values()))
    return RankFigures(
        slowest,
        math.exp(level + lasting[slowest]),
        math.exp(level + usual),
        math.sqrt(max(_spread(sorted(means.values())) ** 2 - error**2, 0.0)),
        error,
    )


def _spread(means: Sequence[float]) -> float:
    """Return the standard deviation of ranks' means, in order, as their middle shows it."""
    if len(means) == 2:  # noqa: PLR2004 - a pair has no others
        return PAIR * (means[1] - means[0])
    middle = (len(means) - 1) // 2
    others = (*means[:middle], *means[middle + 1 : -1])
    return UNBIASED * statistics.median(abs(one - means[middle]) for one in others)


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def limit(ranks: int, spread: float, error: float) -> float:
    """Return from which ratio of own work on one of so many ranks is slow."""
    wide = Z * math.hypot(error, max(spread, SPREAD) * min(1 + FEW / ranks, MOST))
    return math.exp(min(wide, HUGE))


class NodeRanks(NamedTuple):
    """What a node tells of its ranks of one role, over one of the times."""

    node: str
    role: str
    ranks: int
    step: float
    """Seconds of a step."""
    figures: RankFigures


class Slow(NamedTuple):
    """A rank that is slow beside all others of its role, and not just the slowest of them."""

    node: str
    role: str
    rank: int
    ratio: float
    """Its own work relative to the usual one."""
    limit: float
    loss: float
    """The share of a step that the job loses to it, at most; nothing if it is not above LOSS."""


def slow_ranks(parts: Sequence[NodeRanks]) -> list[Slow]:
    """Return the slow ranks of a job, as far as these nodes show, over one of the times.

    The same as the rules of the group dshealthd-ranks in `deploy/prometheus/recording.yml`.
    """
    most = max((part.figures.slow for part in parts), default=0.0)
    found = []
    for role in sorted({part.role for part in parts}):
        nodes = [part for part in parts if part.role == role]
        usuals = [part.figures.usual for part in nodes]
        # Of two nodes all ranks of one may be slow; a pair of ranks may hold the slow one.
        several, ranks = len(nodes) > 2, sum(part.ranks for part in nodes)  # noqa: PLR2004
        usual = statistics.median(usuals) if several else min(usuals)
        pick = statistics.median if ranks > 4 else min  # noqa: PLR2004
        spread = pick(part.figures.spread for part in nodes)
        if several:
            apart = statistics.median(abs(math.log(own) - math.log(usual)) for own in usuals)
            spread = max(spread, 1.4826 * apart)
        bound = limit(ranks, spread, pick(part.figures.error for part in nodes))
        slow = [
            Slow(
                *(part.node, role, part.figures.rank, part.figures.slow / usual, bound),
                # What it still waits for a rank with more to do is no loss.
                (part.figures.slow - usual - (most - part.figures.slow)) / part.step,
            )
            for part in nodes
            if part.figures.slow > bound * usual
        ]
        if len(slow) <= max(len(nodes) / 4, 1):  # else their work is unequal by nature
            found += slow
    return found
