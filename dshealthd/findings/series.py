"""Series: samples that the rules of findings look up by metric and label values, and the signs that
they give.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.core.collector import Metric, MetricKind, Sample
from dshealthd.findings.finding import Sign
from dshealthd.findings.limits import Limits
from dshealthd.findings.past import DAY, Measure, Past, Window

if TYPE_CHECKING:
    from dshealthd.jobs.hangs.judge import Standstill

    Wanted = str | Collection[str]
    """A label's value, or a set of values of which any will do."""

DEFAULTS = Limits()
RECENT = 600.0
"""Seconds for which a line of the kernel log counts as current."""
LINES_COUNT = DAY
"""Most seconds for which rules count lines of the kernel log."""
UNNAMED = frozenset(("", "other"))
"""Devices of kernel events that lines do not name, or that are too many to be named."""


def short_name(metric: Metric) -> str:
    """Return a metric's name as rules have it: without `dshealthd_`."""
    return metric.name.removeprefix("dshealthd_")


def metric_name(name: str) -> str:
    """Return the whole name of a metric that rules have as `name`."""
    return name if name.startswith("process_") else f"dshealthd_{name}"


class Point(NamedTuple):
    """One series and its current value."""

    labels: Mapping[str, str]
    value: float


class Series:
    """All samples of one moment.

    Only series that a rule receives get a label mapping: a node with eight GPUs has a thousand
    series, nearly all of them healthy.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        limits: Limits = DEFAULTS,
        past: Past | None = None,
        now: float = 0.0,
        standstills: Mapping[str, Standstill] = MappingProxyType({}),
    ) -> None:
        """Index `samples` by metric name without `dshealthd_`.

        `past` has what earlier moments showed; None where this is the only one. `now` is its clock,
        monotonic seconds. `standstills` are the jobs that stand still here, which are judged
        already.
        """
        if past is not None:
            _names.turn()
        self.limits, self._past, self._now = limits, past, now
        self.standstills = standstills
        by_metric: defaultdict[Metric, list[Sample]] = defaultdict(list)
        for sample in samples:
            by_metric[sample[0]].append(sample)
        self._samples: dict[str, list[Sample]] = {}
        for metric, found in by_metric.items():
            self._samples.setdefault(short_name(metric), []).extend(found)

    def __call__(self, name: str, **labels: Wanted) -> Iterator[Point]:
        """Yield the series of `dshealthd_NAME` with these labels, each a value or a set of values.

        Names that begin with `process_` are the agent's own and have no prefix.
        """
        for metric, values, value in self._with(name, labels):
            yield Point(_names.of(metric.dimensions, values), value)

    def _with(self, name: str, labels: Mapping[str, Wanted]) -> list[Sample]:
        """Return the samples of `dshealthd_NAME` with these labels, without label mappings."""
        samples = self._samples.get(name)
        if not samples:  # as nine in ten of the rules' queries on a healthy node
            return []
        dimensions = samples[0].metric.dimensions
        if not labels.keys() <= set(dimensions):
            return []
        for key, wanted in labels.items():
            position = dimensions.index(key)
            values = (wanted,) if isinstance(wanted, str) else wanted
            samples = [sample for sample in samples if sample.labels[position] in values]
        return samples

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples of metrics that rules derive, so that their past can be asked for."""
        for sample in samples:
            self._samples.setdefault(short_name(sample.metric), []).append(sample)

    @functools.cached_property
    def gpus(self) -> Mapping[str, Mapping[str, str]]:
        """Labels of this node's GPUs by PCI address, also of those that are gone: a fault may do
        that.
        """
        return {labels["pci"]: labels for labels, _ in self.lately("gpu_info", LINES_COUNT)}

    @property
    def remembers(self) -> bool:
        """Return whether this is one of many moments, so that a sign can have lasted."""
        return self._past is not None

    def limit(self, name: str) -> float:
        """Return the configured limit of this name."""
        return float(getattr(self.limits, name))

    def rise(
        self,
        name: str,
        seconds: float,
        *,
        full: bool = False,
        from_zero: bool = False,
        **labels: Wanted,
    ) -> Iterator[Point]:
        """Yield by how much matching counters rose within the last `seconds`; none without a past.

        Resets are accounted for. A counter that appears beside others of its name began at 0; the
        first ones of a name did not, unless `from_zero`, for counters that exist from their first
        event on. `full` leaves out series that are not known for that long.
        """
        return self._over_time(Measure.RISE, name, seconds, labels, full=full, from_zero=from_zero)

    def highest(
        self, name: str, seconds: float, *, full: bool = False, **labels: Wanted
    ) -> Iterator[Point]:
        """Yield the highest values within the last `seconds`, also of series that are gone."""
        return self._over_time(Measure.HIGHEST, name, seconds, labels, full=full)

    def lately(self, name: str, seconds: float, **labels: Wanted) -> Iterator[Point]:
        """Yield what `highest` does, and without a past the series of this moment."""
        past = self._over_time(Measure.HIGHEST, name, seconds, labels, full=False)
        yield from list(past) or self(name, **labels)

    def peak(self, name: str, seconds: float, **labels: Wanted) -> Iterator[Point]:
        """Yield the highest values that series ever had, until they are absent for `seconds`.

        For what has to stay as it was: a window would learn the fault in time.
        """
        return self._over_time(Measure.PEAK, name, seconds, labels, full=False)

    def lowest(
        self, name: str, seconds: float, *, full: bool = False, **labels: Wanted
    ) -> Iterator[Point]:
        """Yield the lowest values within the last `seconds`, also of series that are gone."""
        return self._over_time(Measure.LOWEST, name, seconds, labels, full=full)

    def mean(
        self, name: str, seconds: float, *, full: bool = False, **labels: Wanted
    ) -> Iterator[Point]:
        """Yield the means of the last `seconds`, also of series that are gone."""
        return self._over_time(Measure.MEAN, name, seconds, labels, full=full)

    def median(self, name: str, seconds: float, **labels: Wanted) -> Iterator[Point]:
        """Yield the medians of the last `seconds`, also of series that are gone."""
        return self._over_time(Measure.MEDIAN, name, seconds, labels, full=False)

    def usual(self, name: str, seconds: float, within: float, **labels: Wanted) -> Iterator[Point]:
        """Yield the medians of the last `seconds` of series that are known for as long.

        A value of more than `within` times its series' median counts as that: what is compared with
        the usual does not become usual for a day.
        """
        return self._over_time(Measure.USUAL, name, seconds, labels, full=True, within=within)

    def _over_time(
        self,
        kind: Measure,
        name: str,
        seconds: float,
        labels: Mapping[str, Wanted],
        *,
        full: bool,
        from_zero: bool = False,
        within: float = math.inf,
    ) -> Iterator[Point]:
        if self._past is None:
            return iter(())
        samples = self._with(name, labels)
        # Nine in ten queries on a healthy node. From 0 it counts how long the counter was absent.
        if not samples and not from_zero and not self._past.has(kind, name, seconds, labels):
            return iter(())
        window = self._past.window(kind, name, seconds, labels, from_zero=from_zero)
        window.within = within
        if samples:
            window.dimensions = samples[0].metric.dimensions
        window.add(self._now, [(sample.labels, sample.value) for sample in samples])
        return self._named(window, full=full) if window else iter(())

    def _named(self, window: Window, *, full: bool) -> Iterator[Point]:
        for values, value in window.values(self._now if full else None):
            yield Point(_names.of(window.dimensions, values), value)

    def samples(self, metrics: Collection[Metric]) -> Iterator[Sample]:
        """Yield the samples of these metrics."""
        for metric in metrics:
            yield from self._samples.get(short_name(metric), ())

    def drop(self, name: str, over: Callable[[Point], bool]) -> None:
        """Drop the series of `dshealthd_NAME` for which `over` is true."""
        self._samples[name] = [
            sample
            for sample, point in zip(self._with(name, {}), self(name), strict=True)
            if not over(point)
        ]

    def has(self, name: str, **labels: Wanted) -> bool:
        """Return whether there is a matching series."""
        return bool(self._with(name, labels))

    def value(self, name: str, **labels: Wanted) -> float | None:
        """Return the value of the first matching series; None if there is none."""
        return next((sample.value for sample in self._with(name, labels)), None)

    def first(self, name: str, **labels: Wanted) -> Mapping[str, str]:
        """Return the labels of the first matching series; none if there is none."""
        return next((point.labels for point in self(name, **labels)), {})

    def parts(self, name: str, *keys: str, **labels: Wanted) -> set[tuple[str, ...]]:
        """Return the values of the labels `keys` for matching series that are not 0."""
        return {
            tuple(sample.labels[sample.metric.dimensions.index(key)] for key in keys)
            for sample in self._with(name, labels)
            if sample.value
        }


class _Names:
    """Label mappings of the series that rules received at this judgment and the previous one.

    A series keeps its labels, and building the mappings is 40 % of the time judging takes. Those
    of ended jobs are dropped at the next moment.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._now: dict[tuple[tuple[str, ...], tuple[str, ...]], Mapping[str, str]] = {}
        self._before = self._now

    def turn(self) -> None:
        """Forget the label mappings that the last judgement has not used."""
        self._now, self._before = {}, self._now

    def of(self, dimensions: tuple[str, ...], values: tuple[str, ...]) -> Mapping[str, str]:
        """Return a series' labels as a mapping."""
        key = dimensions, values
        named = self._now.get(key)
        if named is None:
            named = self._before.get(key)
            if named is None:
                named = MappingProxyType(dict(zip(dimensions, values, strict=True)))
            self._now[key] = named
        return named


_names = _Names()


def of_document(document: Mapping[str, Any]) -> Series:
    """Return the finite samples of a status document (docs/status-api.md), from whatever agent."""
    return Series(
        Sample(metric, tuple(sample["labels"].get(label, "") for label in metric.labels), value)
        for name, family in document.get("metrics", {}).items()
        for labels in [tuple(family["samples"][0]["labels"]) if family["samples"] else ()]
        for metric in [Metric(name, MetricKind.GAUGE, "", labels)]
        for sample in family["samples"]
        if isinstance(value := sample["value"], int | float)
    )


def over(
    series: Series,
    alert: str,
    value: float | None,
    limit: str,
    source: str,
    reason: str = "",
    labels: Mapping[str, str] | None = None,
    **more: Any,
) -> Iterator[Sign]:
    """Yield a sign if `value` is above the limit of this name; `more` are fields of it."""
    if value is not None and value > series.limit(limit):
        yield Sign(alert, reason, labels or {}, value=value, limit=limit, source=source, **more)


def each_over(
    series: Series,
    alert: str,
    points: Iterable[Point],
    limit: str,
    source: str,
    reason: str = "",
    *,
    divisor: float = 1.0,
    **more: Any,
) -> Iterator[Sign]:
    """Yield a sign for each point whose value, divided, is above the limit of this name."""
    for labels, value in points:
        yield from over(series, alert, value / divisor, limit, source, reason, labels, **more)


def flagged(
    series: Series, alert: str, name: str, reason: str, *, at: float = 1.0, **more: Any
) -> Iterator[Sign]:
    """Yield a sign for each series of a metric whose value is `at`."""
    for labels, value in series(name):
        if value == at:
            yield Sign(alert, reason, labels, source=name, **more)


def by(
    points: Iterable[Point], label: str, combine: Callable[[list[float]], float] = sum
) -> dict[str, float]:
    """Return the values of points by a label's value, combined where several have the same."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for labels, value in points:
        values[labels[label]].append(value)
    return {key: combine(found) for key, found in values.items()}


def keyed(points: Iterable[Point], *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of points by the values of these labels, which no two points share."""
    return {tuple(point.labels[label] for label in labels): point.value for point in points}


def of_gpus(series: Series, name: str, **labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by GPU: its index and UUID."""
    return keyed(series(name, **labels), "gpu", "uuid")


def some(points: Iterable[Point]) -> bool:
    """Return whether a point's value is above 0."""
    return any(point.value > 0 for point in points)


def share(part: float | None, whole: float | None) -> float | None:
    """Return `part` as a share of `whole`; None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def logged(
    series: Series,
    alert: str,
    *events: str,
    part: str,
    at_least: float = 1.0,
    seconds: float = RECENT,
    together: bool = False,
    **more: Any,
) -> Iterator[Sign]:
    """Yield a sign for each device with so many such events in the kernel's log within `seconds`.

    `part` is what a device is called if lines do not name it: `an adapter`. One that they name is
    `eth0` or `adapter 0000:17:00.0`, or that GPU if it is one by this address. Those with fewer
    events each, as the modules of its memory, are one part of the node if they are taken
    `together`.
    """
    name = "kernel_events_total"
    rises = series.rise(name, seconds, event=events)
    found = by((point for point in rises if point.value > 0), "device")
    gpus, others = series.gpus, 0.0  # each time, because the past is kept of what is asked for
    for device, lines in found.items():
        if device in UNNAMED or (together and lines < at_least):
            others += lines
        elif lines < at_least:
            continue
        elif device in gpus:
            yield Sign(alert, labels=gpus[device], value=lines, source=name, **more)
        else:
            plain = device[0].isalpha() and ":" not in device
            named = device if plain else f"{part.partition(' ')[2]} {device}"
            yield Sign(alert, part=named, value=lines, source=name, **more)
    if others >= at_least:
        yield Sign(alert, part=part, value=others, source=name, **more)


def each(signs: Iterable[Sign], **changes: Any) -> Iterator[Sign]:
    """Yield signs with some of their fields changed."""
    for sign in signs:
        yield dataclasses.replace(sign, **changes)
