"""The past of the series that findings compare with: coarse, bounded, kept over restarts."""

from __future__ import annotations

import enum
import functools
import math
import statistics
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema

if TYPE_CHECKING:
    Labels = tuple[str, ...]

STEPS = 30
"""Steps of a window: where it begins is exact to a thirtieth of its length."""
MINUTES_5, MINUTES_15, HOUR, DAY = 300.0, 900.0, 3600.0, 86400.0
WEEK = 7 * DAY
"""Seconds over which rules look back unless their subject has a time of its own. What is gone, such
as a port, and how it was, is remembered for a week."""
CLOCK_SET = 60.0
"""Seconds by which the clock must move between two judgements, against the monotonic one, to have
been set: NTP slews both. It also moves while the node is suspended."""
LASTING = DAY
"""Seconds after which a level far above the usual is the series' own: nobody mends it any more."""
MAX_SERIES = 2048
"""Most series of one window; further ones are not kept. 16 GPUs with 18 links have 288 of a
type."""


MAX_FIGURE = 1e100
"""The largest figure that is kept: a window's sum of such is finite, and no source has one."""


_WINDOW = schema.Record(
    {
        "dimensions": schema.of(tuple[str, ...]),
        "series": schema.of(tuple[tuple[tuple[str, ...], float, list[float]], ...]),
    }
)


class Measure(enum.StrEnum):
    """What a window says of its series."""

    RISE = "rise"
    HIGHEST = "highest"
    LOWEST = "lowest"
    MEAN = "mean"
    PEAK = "peak"
    MEDIAN = "median"
    USUAL = "usual"
    """The median, but of values that are near it, once it is known for the whole window."""


class Window:
    """The last `seconds` of the series that one rule asks for.

    That of a peak is not a window: it keeps the highest value that a series has ever had, until the
    series has been absent for `seconds`.

    A series is a flat array of steps: the time at which the step began, then its figures: the
    counter's total or the value at its end, the highest or lowest value in it, or sum and number of
    its values.
    """

    def __init__(self, kind: Measure, seconds: float, *, from_zero: bool = False) -> None:
        """Start empty. `from_zero`: an absent counter has the value 0."""
        self.kind, self.seconds, self.step = kind, seconds, seconds / STEPS
        self._dimensions: tuple[str, ...] = ()
        self.from_zero = from_zero
        self.within = math.inf
        """For the usual: the factor from its median on from which a value counts as that."""
        self.asked = -math.inf
        """Monotonic time at which a rule asked for it, or an earlier agent left it."""
        self._added = self._began = -math.inf
        self._series: dict[Labels, array[float]] = {}
        self._raw: dict[Labels, float] = {}
        """Each counter's last value: what it rose by is added up, so that a reset loses nothing.

        Of the usual, the seconds for which a series has been far above it.
        """
        self._width = 3 if kind is Measure.MEAN else 2

    def __bool__(self) -> bool:
        """Tell whether there is any series."""
        return bool(self._series)

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the series' labels, also while their source gives none; empty before the first.

        Series with other names, as an earlier release had them, are dropped.
        """
        return self._dimensions

    @dimensions.setter
    def dimensions(self, names: tuple[str, ...]) -> None:
        if names != self._dimensions:
            self._series, self._raw, self._dimensions = {}, {}, names

    def add(self, now: float, samples: Sequence[tuple[Labels, float]]) -> None:
        """Record the values of the window's series at monotonic time `now`, once."""
        self.asked = now
        if now <= self._added:
            return
        if math.isinf(self._began):
            self._began = now
        if not samples and not self._series:  # as of nine in ten windows on a healthy node
            self._added = now
            return
        # The first series of a name may have counted for years. Later ones, as of a type of error
        # that is new, began at 0.
        begins_at_zero = bool(self._raw) or (self.from_zero and now - self._began > self.step)
        for labels, value in samples:
            if not abs(value) <= MAX_FIGURE or (  # NaN is not either
                labels not in self._raw and len(self._raw) >= MAX_SERIES
            ):
                continue
            if self.kind is Measure.RISE:
                before = self._raw.get(labels, 0.0 if begins_at_zero else value)
                if labels not in self._series:
                    self._series[labels] = array("d", (now - self.step, 0.0))
                total = self._series[labels][-1] + (value - before if value >= before else value)
                self._put(labels, now, total)
            elif self.kind is Measure.MEAN:
                self._put(labels, now, value, 1.0)
            elif self.kind is Measure.USUAL:
                self._put(labels, now, self._usual(labels, now, value))
                continue
            else:
                self._put(labels, now, value)
            self._raw[labels] = value
        self._added = now
        if self._series:
            self._forget(now)

    def _put(self, labels: Labels, now: float, *figures: float) -> None:
        """Add figures to the current step of a series, or begin its next one."""
        kept = self._series.setdefault(labels, array("d"))
        if self.kind is Measure.PEAK:
            kept[:] = array("d", (now, max(*kept[1:], *figures, -math.inf)))
        elif not kept or now - kept[-self._width] >= self.step:
            kept.extend((now, *figures))
        elif self.kind is Measure.MEAN:
            kept[-2] += figures[0]
            kept[-1] += figures[1]
        elif self.kind in (Measure.RISE, Measure.MEDIAN, Measure.USUAL):
            kept[-1] = figures[0]
        else:
            kept[-1] = (max if self.kind is Measure.HIGHEST else min)(kept[-1], figures[0])

    def _usual(self, labels: Labels, now: float, value: float) -> float:
        """Return a value, or the median of its series instead if it is far above.

        Not for longer than LASTING: then the series begins anew.
        """
        kept = self._series.get(labels)
        lasted, self._raw[labels] = self._raw.get(labels, 0.0), 0.0
        if kept is None or kept[0] > self._full(now):
            return value
        median = statistics.median(kept[1::2])
        if value <= self.within * median:
            return value
        lasted += now - self._added if math.isfinite(self._added) else 0.0
        if lasted < LASTING:
            self._raw[labels] = lasted
            return median
        del self._series[labels]
        return value

    def _full(self, now: float) -> float:
        """Return since when a series must be known to be known for the whole window."""
        return now - self.seconds + 2 * self.step

    def _forget(self, now: float) -> None:
        """Drop the steps that ended before the window, and the series without any other."""
        start, width = now - self.seconds, self._width
        # Of a counter, one ended step stays: the window's rise begins at its total.
        spare = width if self.kind is Measure.RISE else 0
        for labels, kept in list(self._series.items()):
            while len(kept) > width + spare and kept[width + spare] <= start:
                del kept[:width]
            if kept[-width] + self.step <= start:
                del self._series[labels], self._raw[labels]

    def values(self, full_at: float | None = None) -> Iterator[tuple[Labels, float]]:
        """Yield each series' labels, and its rise, highest, lowest or mean value.

        With a time, only those of series that are known for the whole window before it, to within
        two steps.
        """
        since = math.inf if full_at is None else self._full(full_at)
        for labels, kept in self._series.items():
            if kept[0] > since:
                continue
            figures = kept[1 :: self._width]
            if self.kind is Measure.RISE:
                yield labels, figures[-1] - figures[0]
            elif self.kind is Measure.MEAN:
                yield labels, sum(figures) / sum(kept[2 :: self._width])
            elif self.kind in (Measure.MEDIAN, Measure.USUAL):
                yield labels, statistics.median(figures)
            else:
                yield labels, (max if self.kind is Measure.HIGHEST else min)(figures)

    def document(self) -> dict[str, Any]:
        """Return the window for JSON."""
        return {
            "dimensions": self._dimensions,
            "series": [
                (labels, self._raw[labels], kept.tolist()) for labels, kept in self._series.items()
            ],
        }

    def restore(self, document: Any, clock: float, now: float, place: str = "window") -> None:
        """Restore what `document` returned at `clock` by the clock of then, which is `now` by this
        one. Raise SchemaError if it is not that.
        """
        found = _WINDOW.read(document, place)
        self.asked, self._dimensions = now, found["dimensions"]
        for labels, raw, figures in found["series"]:
            if len(labels) != len(self._dimensions) or not figures or len(figures) % self._width:
                schema.misfit(place, f"has a series with {labels[:6]} and {figures[:6]}")
            kept = self._series[labels] = array("d", figures)
            for at in range(0, len(kept), self._width):
                kept[at] += now - clock
            self._raw[labels] = raw
            self._began = min(now, max(self._began, kept[0]))


@functools.cache  # which takes longer to make than a window to be added to
def _key(
    kind: Measure, name: str, seconds: float, *labels: tuple[str, str | Collection[str]]
) -> str:
    """Return the key of a window in the state file: what a rule asks for."""
    wanted = ",".join(
        f"{key}={value if isinstance(value, str) else '|'.join(sorted(value))}"
        for key, value in sorted(labels)
    )
    return f"{kind} {name} {seconds:g} {wanted}"


class Past:
    """The windows that rules ask for, by what they ask."""

    def __init__(self) -> None:
        """Start empty."""
        self._windows: dict[str, Window] = {}

    def has(
        self,
        kind: Measure,
        name: str,
        seconds: float,
        labels: Mapping[str, str | Collection[str]],
    ) -> bool:
        """Return whether there is the window of a query."""
        return _key(kind, name, seconds, *labels.items()) in self._windows

    def window(
        self,
        kind: Measure,
        name: str,
        seconds: float,
        labels: Mapping[str, str | Collection[str]],
        *,
        from_zero: bool = False,
    ) -> Window:
        """Return the window of a query; the first call makes it."""
        key = _key(kind, name, seconds, *labels.items())
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = Window(kind, seconds)
        window.from_zero = from_zero
        return window

    def document(self, now: float) -> dict[str, Any]:
        """Return all windows for JSON; `now` is monotonic time in seconds.

        Not those that no rule has asked for within their length, as the rules of an earlier
        release.
        """
        return {
            key: window.document()
            for key, window in self._windows.items()
            if now - window.asked <= window.seconds
        }

    def restore(
        self, document: Mapping[str, Any], clock: float, now: float, *, booted: bool = False
    ) -> None:
        """Restore what `document` returned at `clock`, as each window does. If the node has
        `booted` since, only windows of a day and more: they say how its hardware was, and the
        others what had just happened.

        Raise SchemaError if it is not that, and keep nothing of it.
        """
        windows = {}
        with schema.reading("the past"):
            for key, rows in document.items():
                kind, _, seconds, *_ = key.split(" ")
                if booted and float(seconds) < DAY:
                    continue
                windows[key] = Window(Measure(kind), float(seconds))
                windows[key].restore(rows, clock, now, key)
        self._windows = windows
