"""Baselines, what is usual for this node: median and deviation of every class of timing.

A class is learnt over days, not from the current round: a slow leaf slows a whole round. Flagged
timings are not learnt. The reference that timings are compared with may creep up by only a few per
cent, so that a part that gets a little slower each day does not pass as usual. It comes down at
once if the part becomes faster, as no fault does that.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.core import documents, schema
from dshealthd.probe.observation import FLOOR

if TYPE_CHECKING:
    from dshealthd.probe.options import BaselineOptions

KEPT = 256
"""Maximum values of a class; with SPACING they span 64 hours."""
SPACING = 900.0
"""Minimum seconds between two kept values, once a class has FILL of them."""
FILL = 64
ENOUGH = 16
"""Minimum values of a class; its median is then known to within a third of sigma."""
RECENT = 8
"""Consecutive values that show that a part has become faster: a minute and a half."""
MAX_CLASSES = 2048
"""Maximum classes of one node. 8 rails, 4 sizes, on one leaf and across: 64; a few dozen others."""
_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""
RESENT = 0.2
"""Seconds after which Linux first sends a lost packet again (TCP_RTO_MIN). A round trip in a
cluster takes milliseconds, so an echo without a baseline that takes as long has lost packets.
"""
CREEP_RATIO = 0.05
"""How far a baseline may rise above its lowest median with this software."""
SIBLING_RATIO = 0.15
"""How far the baseline of a part may lie above the median of the node's others: this flags a part
that was slow from the beginning.
"""
_LEAST_SIBLINGS = 3
"""Minimum other parts of the node whose median can judge one part: of two, one may be slow."""
LIGHT_RATIO = 2.0
"""Least excess of a flagged echo between agents, which depends on the load of both hosts."""
DEVIATIONS = 3.5
"""Standard deviations of its class from which on a timing is flagged: 1 in 4,000 of normal ones. It
takes three in a row, and more of other peers, to accuse anybody.
"""
_SMALL = 6.0
"""A deviation of n values is multiplied by 1 + 6/n, as it and the median are uncertain."""
_FASTER = 0.03
"""Minimum share by which recent values must lie below the median to replace it."""
ANCHOR_KEPT = 15 * 86400.0
"""Seconds after which the search for the lowest median restarts. The lowest of the preceding period
counts for as long again. So one wrong value does not count forever, and a part may creep by
`CREEP_RATIO` in a month.
"""


class TimingClass(NamedTuple):
    """A class of timings that can be compared with each other."""

    kind: str
    backend: str
    op: str
    size: int
    part: str
    far: bool
    """Whether the nodes are on different leaves: more hops, different times."""


class Reading(NamedTuple):
    """A timing relative to its class."""

    ratio: float
    limit: float
    """The ratio from which the timing is flagged."""


@dataclass(slots=True, eq=False)
class _Class:
    values: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    kept_at: float = -math.inf
    anchor: float = math.inf
    """The lowest median of many values since `anchored`."""
    earlier: float = math.inf
    """The lowest median of the period before that."""
    anchored: float = -math.inf
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    median: float = 0.0
    sigma: float = 0.0
    reference: float = 0.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.values:
            self._measure()

    @property
    def known(self) -> bool:
        return len(self.values) >= ENOUGH

    def learn(self, value: float, at: float) -> bool:
        """Add a value to the baseline if one is due; tell whether anything has changed."""
        self.recent.append(value)
        if self.known and len(self.recent) == RECENT and self._faster():
            self.values = deque(self.recent, KEPT)
            self.anchor = self.earlier = math.inf
        # `at < kept_at`: the clock was ahead at the last value, and waiting for it to catch up may
        # take years.
        elif len(self.values) < FILL or at - self.kept_at >= SPACING or at < self.kept_at:
            self.values.append(value)
        else:
            return False
        self.kept_at = at
        self._measure()
        return True

    def _faster(self) -> bool:
        """Return whether nearly all recent values are faster than the baseline's chance
        explains.
        """
        limit = self.median * (1 - max(_FASTER, 2 * self.sigma))
        return sum(value < limit for value in self.recent) >= RECENT - 1

    def _measure(self) -> None:
        self.median = median(self.values)
        spread = median([abs(value - self.median) for value in self.values])
        self.sigma = _TO_SIGMA * spread / self.median * (1 + _SMALL / len(self.values))
        if len(self.values) >= FILL:
            # Below 0 the clock was set back. Starting a new period is then safe, as `earlier` still
            # counts.
            if not 0 <= self.kept_at - self.anchored < ANCHOR_KEPT:
                self.earlier, self.anchor, self.anchored = self.anchor, math.inf, self.kept_at
            self.anchor = min(self.anchor, self.median)

    @property
    def lowest(self) -> float:
        """The lowest median of a stretch between ANCHOR_KEPT and twice that long."""
        return min(self.anchor, self.earlier)


class Baselines:
    """The baselines of all classes that this node has timed."""

    def __init__(self, options: BaselineOptions, stamp: str = "") -> None:
        self.slow_ratio = options.slow_ratio
        self.stamp = stamp
        """The software that is timed (dshealthd, torch, CUDA). Baselines of different software are
        not comparable.
        """
        self._classes: dict[TimingClass, _Class] = {}
        self._families: dict[TimingClass, dict[str, _Class]] = {}
        self.changed = False
        """Whether there are changes since the last `document`."""

    def __len__(self) -> int:
        return len(self._classes)

    def ratio(self, series: TimingClass, seconds: float) -> Reading | None:
        """Return a timing relative to its class's baseline; None if too little is known."""
        known = self._classes.get(series)
        if known is None or not known.known:
            return self._prior(series, seconds)
        return Reading(seconds / known.reference, known.limit)

    def update(self, series: TimingClass, seconds: float, at: float) -> None:
        """Learn a timing of a round in which nothing was wrong; `at` is Unix time. A timing below
        what any transport can do is not learnt.
        """
        if not FLOOR <= seconds < math.inf:
            return
        known = self._classes.get(series)
        if known is None:
            if len(self._classes) >= MAX_CLASSES:
                return
            known = self._put(series, _Class())
        if known.learn(seconds, at):
            self.changed = True
            self._refer(series, known)

    def _put(self, series: TimingClass, new: _Class) -> _Class:
        self._classes[series] = new
        self._families.setdefault(series._replace(part=""), {})[series.part] = new
        return new

    def _siblings(self, series: TimingClass) -> list[_Class]:
        """Return the same class's baselines of the node's other parts, if enough are known."""
        family = self._families.get(series._replace(part=""), {})
        siblings = [
            other for part, other in family.items() if part != series.part and part and other.known
        ]
        return siblings if series.part and len(siblings) >= _LEAST_SIBLINGS else []

    def _refer(self, series: TimingClass, known: _Class) -> None:
        """Compute a class's reference, which timings are compared with, and its limit."""
        known.reference = min(known.median, known.lowest * (1 + CREEP_RATIO))
        if siblings := self._siblings(series):
            known.reference = min(
                known.reference, median([other.median for other in siblings]) * (1 + SIBLING_RATIO)
            )
        known.limit = self._limit(series, known.sigma)

    def _limit(self, series: TimingClass, sigma: float) -> float:
        floor = max(self.slow_ratio, LIGHT_RATIO if series.kind == "light" else 0.0)
        return 1 + max(floor, DEVIATIONS * sigma)

    def _prior(self, series: TimingClass, seconds: float) -> Reading | None:
        """Judge a part without a baseline by the other parts of its node. The tolerance allows for
        the differences between them. An echo is judged by when TCP sends a packet again.
        """
        if series.kind == "light":
            limit = self._limit(series, 0.0)
            return Reading(seconds / RESENT * limit, limit)
        if not (siblings := self._siblings(series)):
            return None
        sigma = 1.5 * max(other.sigma for other in siblings)
        usual = median([other.median for other in siblings]) * (1 + SIBLING_RATIO)
        return Reading(seconds / usual, self._limit(series, sigma))

    def document(self) -> str:
        """Return the baselines as `restore` reads them."""
        rows = [
            [
                *series,
                *(
                    value if math.isfinite(value) else None  # JSON has no infinity
                    for value in (known.kept_at, known.anchor, known.earlier, known.anchored)
                ),
                # Far finer than the repeatability of a timing.
                [float(f"{value:.7g}") for value in known.values],
            ]
            for series, known in self._classes.items()
            if known.values
        ]
        self.changed = False
        content = {"stamp": self.stamp, "classes": rows}
        return documents.dumps(content, separators=documents.COMPACT)

    def restore(self, document: Any) -> None:
        """Restore what `document` wrote, if it is there and of this software. Raises SchemaError if
        it is of another shape.
        """
        if document is None:
            return
        with schema.reading("the file of baselines"):
            if document["stamp"] != self.stamp:
                return
            classes = dict(map(_row, document["classes"]))
        for series, known in classes.items():
            self._put(series, known)
        # Only after all are in place: a class is compared with its siblings too.
        for series, known in classes.items():
            self._refer(series, known)


def _row(row: list[Any]) -> tuple[TimingClass, _Class]:
    *key, kept_at, anchor, earlier, anchored, values = row
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"{key} has values that are not positive, finite times")
    return TimingClass(*key), _Class(
        deque(map(float, values), KEPT),
        -math.inf if kept_at is None else float(kept_at),
        math.inf if anchor is None else float(anchor),
        math.inf if earlier is None else float(earlier),
        -math.inf if anchored is None else float(anchored),
    )
