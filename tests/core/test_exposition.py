"""The text format, compared byte for byte with that of prometheus_client."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterable, Iterator

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dshealthd.core.collector import Buckets, Metric, MetricKind, Sample
from dshealthd.core.exposition import Renderer, clean_label, number, render

MAX_LABEL_LENGTH = 128

names = st.from_regex(r"[a-z][a-z0-9_]{0,20}[a-z]", fullmatch=True)
texts = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")) | st.sampled_from('\\"'),
    max_size=30,
)


@st.composite
def families(draw: st.DrawFn) -> list[Sample]:
    """Draw the samples of some metrics."""
    samples: list[Sample] = []
    for name in draw(st.lists(names, unique=True, max_size=4)):
        kind = draw(st.sampled_from(MetricKind))
        labels = tuple(
            draw(st.lists(names.filter(lambda name: name != "le"), unique=True, max_size=3))
        )
        metric = Metric(
            f"x_{name}_total" if kind is MetricKind.COUNTER else f"x_{name}_g",
            kind,
            draw(texts),
            labels,
        )
        series = draw(
            st.lists(st.tuples(*(texts for _ in labels)), unique=True, min_size=1, max_size=3)
        )
        if kind is MetricKind.HISTOGRAM:
            for values in series:
                buckets = Buckets(
                    sorted(draw(st.lists(st.floats(0, 1e5), unique=True, max_size=3)))
                )
                for value in draw(st.lists(st.floats(0, 1e12), max_size=5)):
                    buckets.observe(value)
                samples += buckets.samples(metric, *values)
        else:
            samples += [Sample(metric, values, draw(st.floats())) for values in series]
    return samples


class Reference(Collector):
    """The same samples as a collector of prometheus_client."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        """Keep the samples."""
        self.samples = samples

    def collect(self) -> Iterator[Family]:
        """Yield one family a metric."""
        found: dict[Metric, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        buckets: list[tuple[str, float]] = []
        for metric, labels, value in self.samples:
            if metric.kind is MetricKind.HISTOGRAM:
                *values, part = labels
                if part == "sum":
                    family = found.setdefault(
                        metric,
                        HistogramMetricFamily(metric.name, metric.help, labels=metric.labels),
                    )
                    assert isinstance(family, HistogramMetricFamily)
                    family.add_metric(values, buckets=buckets, sum_value=value)
                    buckets = []
                elif part != "count":
                    # theirs
                    buckets.append((floatToGoString(part), value))  # type: ignore[no-untyped-call]
                continue
            kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
            plain = found.setdefault(metric, kind(metric.name, metric.help, labels=metric.labels))
            assert not isinstance(plain, HistogramMetricFamily)
            plain.add_metric(labels, value)
        yield from found.values()


@given(families())
def test_equals_prometheus_client(samples: list[Sample]) -> None:
    """The text is byte for byte what the reference implementation writes for the same families."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(Reference(samples))
    assert render(samples).encode() == prometheus_client.generate_latest(registry)


@pytest.mark.parametrize(
    "value", [999_999.5, 1e6, 1_234_567.5, 9e15, 1e16, -1e7, -0.0, math.inf, -math.inf, math.nan]
)
def test_numbers_at_the_limits_of_their_forms(value: float) -> None:
    """With an exponent from a million on, as Go writes them."""
    assert number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


def test_labels_are_cleaned() -> None:
    r"""Control characters and surrogates are removed or replaced and the length is bounded, so that
    a `\xff` cannot fail a scrape.
    """
    assert clean_label("a\nb\x00c\x7f") == "abc"
    assert clean_label(b"gpu\xff".decode(errors="surrogateescape")) == "gpu?"
    assert len(clean_label("x" * 1000)) == MAX_LABEL_LENGTH


def test_first_of_two_equal_series_counts() -> None:
    """A collector that yields the same series twice does not make a scrape that Prometheus
    rejects.
    """
    metric = Metric("x", MetricKind.GAUGE, "X.", ("a",))
    renderer = Renderer()
    for value in (1.0, 3.0):
        text = renderer.render([metric(value, "b"), metric(2 * value, "b"), metric(9.0, "c")])
        assert text.splitlines()[2:] == [f'x{{a="b"}} {value}', 'x{a="c"} 9.0']


@given(st.lists(families(), min_size=2, max_size=4), st.data())
def test_what_is_kept_does_not_show(scrapes: list[list[Sample]], data: st.DataObject) -> None:
    """Scrape after scrape gives what a first one gives: other values, other series, other order."""
    renderer = Renderer()
    for drawn in scrapes:
        samples = drawn
        for _ in range(2):
            assert renderer.render(samples) == render(samples)
            samples = [
                sample._replace(value=data.draw(st.floats(min_value=0) | st.just(math.nan)))
                for sample in samples
            ]
        turned = data.draw(st.permutations(samples))
        assert renderer.render(turned) == render(turned)
        fewer = turned[: data.draw(st.integers(0, len(turned)))]
        assert renderer.render(fewer) == render(fewer)


class Job(str):
    """A label whose end can be noticed."""

    __slots__ = ("__weakref__",)


def test_series_of_the_past_are_forgotten() -> None:
    """Jobs come and go for months: what is remembered are the series that there are now."""
    metric = Metric("x", MetricKind.GAUGE, "X.", ("job",))
    renderer = Renderer()
    jobs = []
    for place in range(1000):
        job = Job(place)
        jobs.append(weakref.ref(job))
        assert f'{{job="{place}"}} 1.0\n' in renderer.render([metric(1, job)])
        del job
    assert len([job for job in jobs if job() is not None]) <= 1


def test_wrong_number_of_labels_is_refused() -> None:
    """A sample with too few or too many label values is a defect that shows at once, with the
    metric's name.
    """
    with pytest.raises(TypeError, match="x takes the labels"):
        Metric("x", MetricKind.GAUGE, "X.", ("a",))(math.pi)


def test_a_truth_is_a_number() -> None:
    """A collector may pass a condition; documents have 1 or 0 then, as a metric's value is."""
    metric = Metric("dshealthd_test", MetricKind.GAUGE, "For tests.")
    values = [metric(math.isfinite(number))[2] for number in (1.0, math.inf)]
    assert json.dumps(values) == "[1, 0]"
