"""Own work of ranks in windows of steps, and the figures by which ranks are compared.

A rank is slow if the *same* rank takes longer than its peers again and again; that another one is
slowest in each step is the nature of uneven work. So steps are summed up in windows that all ranks
share: window k of length n is the steps [nk, nk + n). Over the last WINDOWS of them a rank's excess
is the mean of ln(its own work / the median of its node's ranks) over the windows, but at most twice
what it was in all but LOW of them: a few events are no persistence.

An excess counts if it is more than Z standard deviations of what the other ranks show: at random,
from window to window (`within`), and constantly (`between`). Both are variances that many ranks and
the last hour know together. PAUSES are compared by the same test: by how much the mean of a window
exceeds the median of its eighths, in which constant differences and slow changes cancel.

`deploy/prometheus/recording.yml` compares nodes by these figures and says when a rank is slow;
`limit` is that criterion for one node. `bench/slow_ranks.py` simulates both.
"""

from __future__ import annotations

import math
import operator
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dshealthd.training.message import Message, Totals

WINDOWS = 8
"""The fewest of which most can exceed what is usual although pauses strike two or three of them."""
PAUSES = "pauses"
SCALES = {"30s": 4.0, "2m": 18.0, "5m": 36.0, PAUSES: 36.0}
"""Aimed seconds of a window, by the nominal time of WINDOWS of them. The shortest tells 1.3 times
in 30 s where ranks are alike; where each step differs by a quarter it takes the mean of 45 steps,
where by 40 %, of 100. A pause of 3 s a minute, 5 % of the time, is in most windows of the longest.
"""
EIGHTHS = 3
"""Windows are told apart in 2^3 parts, of which a pause is in less than half."""
LOW = {PAUSES: 3}
"""Windows of WINDOWS that may be as usual, by the time: else 2.

Events that strike each rank in a share p of the windows strike one in six of eight with 28 p^6, in
five with 56 p^5. At p = 2 %, a pause of 3 s or more in half an hour of each rank, 1,024 ranks have
five of them once in 500 hours.
"""
LEVELS = 16
"""Lengths of windows are powers of two up to 2^15 steps, which take 30 s at 1 ms each."""
FILLED = 4
"""Most windows that one read of a page may end: more are shorter than what a read resolves."""
Z = 6.5
"""Standard deviations of what differs at random, from window to window, from which on a rank is
slow.

One ticket a month in 1,000 jobs is one in 720,000 hours. A rank has 700 independent looks in an
hour (times of 40, 160 and 320 s, of whose eight looks neighbors share most, and pauses), a job of
64 ranks 45,000. So one in 3e10 may be wrong: 6.5 deviations of a normal variable.
"""
LASTS, RANKS = 22.0, 2.0
"""What lasts is looked at anew about once an hour, as the last hour tells what else there is: one
of 720,000 N looks at N ranks may be wrong. That are z deviations of a normal variable, and z^2 is
22 + 2 ln N to within 2 % for 2 to 1,024 ranks.
"""
KNOWN, PRIOR = 10, 0.015**2
"""What is known of lasting differences before any are seen: a deviation of 1.5 %, and so well as if
KNOWN others had shown it: 1.1 to 2.4 % in nine of ten jobs. Like GPUs of five clusters vary by 8 %
(https://arxiv.org/abs/2208.11035), which is a deviation of 1 to 2 % among hundreds. 1.3 times
stands out then of a pair, and of four ranks of which the others differ by up to 4 %.
"""
DOUBT = 1.5
"""What ranks differ by contains what their windows differ by, which is not counted twice: once, and
half as much again, which is one standard deviation of a variance that eight values show.
"""
HUGE = math.log(sys.float_info.max)
"""The largest logarithm of a float: ranks may claim any seconds."""
LOSS = 0.04
"""The share of a step that a job must lose to a slow rank for a ticket, as in `thresholds.yml`."""


class Mark(NamedTuple):
    """What a rank has done by the beginning of a window."""

    number: int
    at: float
    """Monotonic time at which the agent knew."""
    steps: float
    work: float
    wait: float
    typical: float | None = None
    """The median own work of a step in the eighths of the window that ends here; None if
    unknown."""


class Course:
    """The windows of one rank, of all lengths, as the agent reads its heartbeats."""

    __slots__ = ("_last", "_marks")

    def __init__(self) -> None:
        """Start empty."""
        self._last: Totals | None = None
        self._marks: list[deque[Mark]] = [deque(maxlen=WINDOWS + 1 + FILLED) for _ in range(LEVELS)]

    def add(self, message: Message, now: float) -> None:
        """Add what a heartbeat says of the rank's steps, read at `now`, monotonic seconds."""
        last, totals = self._last, message.totals
        self._last = totals
        if last is None or totals is None or totals.step == last.step:
            return
        if totals.step < last.step or any(map(operator.lt, totals[1:], last[1:])):
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
                typical = self._typical(level - EIGHTHS, number << EIGHTHS)
                marks.append(Mark(number, now, *sums)._replace(typical=typical))

    def _typical(self, level: int, number: int) -> float | None:
        """Return the median own work of a step in the windows before this one."""
        found = self._windows(level, number) if level >= 0 else None
        return statistics.median(own for own, _, _ in found) if found else None

    def number(self, level: int, oldest: float) -> int | None:
        """Return the number of the window of 2^level steps that has begun; None if it began before
        `oldest`, monotonic seconds: a rank that makes no steps has no speed.
        """
        marks = self._marks[level]
        return marks[-1].number if marks and marks[-1].at >= oldest else None

    def windows(self, level: int, number: int, over: str = "") -> list[float] | None:
        """Return the own work of a step in each of the WINDOWS before this one, in seconds; of
        PAUSES, a step and what pauses add to it; None if not all are known.
        """
        found = self._windows(level, number)
        if found is None:
            return None
        if over != PAUSES:
            return [own for own, _, _ in found]
        return [own + step - typical for own, step, typical in found if typical is not None]

    def _windows(self, level: int, number: int) -> list[tuple[float, float, float | None]] | None:
        """Return own work, seconds and typical own work of a step in each of the WINDOWS."""
        marks = [mark for mark in self._marks[level] if mark.number <= number][-WINDOWS - 1 :]
        if len(marks) <= WINDOWS or marks[-1].number - marks[0].number != WINDOWS:
            return None
        found = []
        for a, b in pairwise(marks):
            steps, work = b.steps - a.steps, b.work - a.work
            if not (steps > 0 and 0 < work < math.inf):
                return None
            found.append((work / steps, (work + b.wait - a.wait) / steps, b.typical))
        return found

    def shares(self, level: int) -> tuple[float, float] | None:
        """Return own work and wait of a step in seconds over the last windows of 2^level steps."""
        marks = list(self._marks[level])[-WINDOWS - 1 :]
        steps = marks[-1].steps - marks[0].steps if marks else 0
        if steps <= 0:
            return None
        last, first = marks[-1], marks[0]
        return (last.work - first.work) / steps, (last.wait - first.wait) / steps


def level(over: str, step: float) -> int:
    """Return the level of windows over one of the times, of steps that take `step` seconds."""
    if step <= 0:
        return LEVELS - 1
    least = EIGHTHS if over == PAUSES else 0
    return min(max(round(math.log2(SCALES[over] / step)), least), LEVELS - 1)


class RankFigures(NamedTuple):
    """Own work of a step of a node's ranks of one role, in seconds; of PAUSES, `Course.windows`."""

    rank: int
    """The slowest."""
    slow: float
    """Its own work, as far as it is persistent."""
    usual: float
    """The median of all ranks."""
    between: float
    """The variance of ln(own work) between ranks, of their means over the windows."""
    within: float
    """The variance of the mean of one rank, as its windows differ."""

    @property
    def distance(self) -> float:
        """How far the slowest is from the median, in standard deviations; infinite if all else is
        equal.
        """
        deviation = math.sqrt(max(self.between, self.within))
        return (math.log(self.slow) - math.log(self.usual)) / deviation if deviation else math.inf


def compare_ranks(
    courses: Mapping[int, Course], over: str, size: int, oldest: float
) -> RankFigures | None:
    """Return the figures of some ranks over their last windows of 2^size steps; None if none has
    enough of them that began after `oldest`, monotonic seconds.
    """
    begun = {rank: course.number(size, oldest) for rank, course in courses.items()}
    numbers = [number for number in begun.values() if number is not None]
    if not numbers:
        return None
    # One rank's page may have been read before its step and another's after it.
    number = max(min(numbers), max(numbers) - 1)
    works = {
        rank: [math.log(seconds) for seconds in windows]
        for rank, course in courses.items()
        if begun[rank] is not None
        and (windows := course.windows(size, number, over))
        and len(windows) == WINDOWS
        and 0 < min(windows) <= max(windows) < math.inf
    }
    return figures_of(works, LOW.get(over, 2)) if works else None


def figures_of(works: Mapping[int, Sequence[float]], low: int = 2) -> RankFigures:
    """Return the figures of ranks from ln(own work) in each of their windows, of which `low` may be
    as usual; of one rank at least.
    """
    middle = [statistics.median_low(window) for window in zip(*works.values(), strict=True)]
    level = statistics.fmean(middle)
    if len(works) == 1:
        # Nothing tells its own pauses from what all ranks do then, so its lower windows count.
        rank = next(iter(works))
        slow = min(level, sorted(middle)[low])
        return RankFigures(rank, math.exp(slow), math.exp(level), 0.0, _within(middle))
    excess = {
        rank: [own - usual for own, usual in zip(work, middle, strict=True)]
        for rank, work in works.items()
    }
    means = {rank: statistics.fmean(values) for rank, values in excess.items()}
    lasting = {rank: min(means[rank], 2 * sorted(values)[low]) for rank, values in excess.items()}
    slowest = max(lasting, key=lasting.__getitem__)
    usual = statistics.median_low(means.values())
    return RankFigures(
        slowest,
        math.exp(level + lasting[slowest]),
        math.exp(level + usual),
        _between(means.values()),
        statistics.median(map(_within, excess.values())),
    )


def _between(means: Iterable[float]) -> float:
    """Return the variance of normal values as all but the greatest of them show it.

    For 4 to 16 values the median of what they show is right to 3 % (10^5 trials). A pair has only
    its difference.
    """
    *others, greatest = sorted(means)
    if len(others) == 1:
        return (greatest - others[0]) ** 2
    return statistics.pvariance(others) * (len(others) + 4) / (len(others) - 1)


def _within(values: Sequence[float]) -> float:
    return statistics.variance(values) / len(values)


def slow_ratio_of(ranks: int, between: float, within: float, prior: float = PRIOR) -> float:
    """Return from which ratio of own work on one of so many ranks is slow.

    What few ranks show of lasting differences may be small by chance. So a variance that is known
    with n degrees of freedom, from KNOWN before and all ranks but the slow and the usual one,
    counts with the square of Student's t instead of z: n (exp(z^2 / n) - 1), to within 6 % of t.
    What is usual is as uncertain as N - 1 others leave it.
    """
    ranks = max(ranks, 2)
    others = ranks - 2
    seen = KNOWN * prior + others * max(between - DOUBT * within, 0.0)
    t = math.expm1((LASTS + RANKS * math.log(ranks)) / (KNOWN + others))
    return math.exp(min(math.sqrt(Z * Z * within + t * seen * ranks / (ranks - 1)), HUGE))


class NodeRanks(NamedTuple):
    """What a node tells of its ranks of one role, over one of the times."""

    node: str
    role: str
    over: str
    ranks: int
    step: float
    """Seconds of a step."""
    figures: RankFigures


def told(node: str, entries: Iterable[Mapping[str, Any]]) -> Iterator[NodeRanks]:
    """Yield what a node's document tells of its ranks of a job, in its field `own_work`."""
    for one in entries:
        if min(one["step_seconds"], one["slow"], one["usual"]) > 0:
            figures = RankFigures(*(one[name] for name in RankFigures._fields))
            of = one["role"], one["over"], one["ranks"], one["step_seconds"]
            yield NodeRanks(node, *of, figures)


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
    """Return the slow ranks of a job, as far as these nodes show: one of each node and role.

    The same as the rules of the groups dshealthd-work-* in `deploy/prometheus/recording.yml`.
    """
    found: dict[tuple[str, str], Slow] = {}
    for over in SCALES:
        of_all = [part for part in parts if part.over == over]
        most = max((part.figures.slow for part in of_all), default=0.0)
        for role in sorted({part.role for part in of_all}):
            for slow in _slow_of_role([part for part in of_all if part.role == role], over, most):
                before = found.setdefault((slow.node, role), slow)
                found[slow.node, role] = max(before, slow, key=lambda one: one.loss)
    return list(found.values())


def _slow_of_role(nodes: Sequence[NodeRanks], over: str, most: float) -> list[Slow]:
    """Return the slow ranks of one role over one of the times.

    `most` is the greatest own work of a rank in any role.
    """
    usuals = [part.figures.usual for part in nodes]
    usual = statistics.median(usuals)
    between = statistics.median(part.figures.between for part in nodes)
    if len(nodes) > 2:  # noqa: PLR2004 - of two, one may be the slow one
        between = max(between, _between(map(math.log, usuals)))
    elif [part.ranks for part in nodes] == [2, 2]:
        # One pair has the slow rank, or both of its ranks are slow.
        four = (work for part in nodes for work in (part.figures.slow, part.figures.usual))
        between = min(between, _between(map(math.log, four)))
    bound = slow_ratio_of(
        sum(part.ranks for part in nodes),
        between,
        statistics.median(part.figures.within for part in nodes),
        0.0 if over == PAUSES else PRIOR,
    )
    found = []
    for part in nodes:
        _, slow, own, *_ = part.figures
        # Of two nodes, all ranks of one may be slow beside the other's.
        ratio = max(slow / usual, own / min(usuals) if len(nodes) == 2 else 0.0)  # noqa: PLR2004
        if ratio > bound:
            # What it still waits for a rank with more to do is no loss.
            loss = (slow - slow / ratio - (most - slow)) / part.step
            found.append(Slow(part.node, part.role, part.figures.rank, ratio, bound, loss))
    # Where more than that are, their work is unequal by nature.
    return found if len(found) <= max(len(nodes) / 4, 1) else []
