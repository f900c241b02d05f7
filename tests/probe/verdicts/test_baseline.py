"""Baselines: what is learnt, what is not, and the file that keeps them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable

import pytest

from dshealthd.core.schema import SchemaError
from dshealthd.probe.options import BaselineOptions
from dshealthd.probe.verdicts.baseline import Baselines, Reading, TimingClass

ENOUGH = 16
FILL = 64
SIBLING_RATIO = 0.15
SPACING = 900.0

OPTIONS = BaselineOptions()


def series(part: str = "", kind: str = "rail") -> TimingClass:
    """Return a timing class of a rail."""
    return TimingClass(kind, "nccl", "all_reduce", 1 << 26, part, far=False)


def learnt(values: Iterable[float], *, part: str = "", stamp: str = "") -> Baselines:
    """Return baselines that have learnt values ten seconds apart."""
    known = Baselines(OPTIONS, stamp)
    for number, value in enumerate(values):
        known.update(series(part), value, number * 10.0)
    return known


def reading(known: Baselines, seconds: float, part: str = "", kind: str = "rail") -> Reading:
    """Return a timing relative to its class, which is known."""
    found = known.ratio(series(part, kind), seconds)
    assert found is not None
    return found


def jittered(usual: float, jitter: float, count: int, seed: int = 1) -> list[float]:
    """Return normally distributed values."""
    draw = random.Random(seed)
    return [usual * draw.gauss(1, jitter) for _ in range(count)]


def test_too_few_values_judge_nothing() -> None:
    """A class that has been timed only a few times has no ratio, and accuses nobody."""
    known = learnt([1.0] * (ENOUGH - 1))
    assert known.ratio(series(), 5.0) is None
    known.update(series(), 1.0, 1000.0)
    assert known.ratio(series(), 5.0) == (5.0, 1 + OPTIONS.slow_ratio)


def test_ratio_is_to_the_median_and_the_limit_follows_the_deviation() -> None:
    """Outliers do not move the median, and a class that varies more has a higher limit."""
    calm, wild = learnt([*jittered(0.01, 0.01, 60), 0.03, 0.05]), learnt(jittered(0.01, 0.05, 60))
    assert reading(calm, 0.02).ratio == pytest.approx(2, rel=0.01)
    assert reading(calm, 0.02).limit == 1 + OPTIONS.slow_ratio
    assert 1.12 < reading(wild, 0.02).limit < 1.25


@pytest.mark.parametrize(("number", "limit"), [(ENOUGH, 1.7135), (FILL, 1.5676)])
def test_few_values_widen_the_limit(number: int, limit: float) -> None:
    """It is 3.5 standard deviations, and a deviation is less certain that few values show."""
    known = learnt([0.9, 1.1] * (number // 2))
    assert reading(known, 1.0) == pytest.approx((1.0, limit), abs=1e-3)


def test_values_span_days() -> None:
    """Of enough values, one a quarter of an hour is kept: a bad hour is a sixtieth of them."""
    known = learnt([1.0] * FILL)
    for second in range(0, 3600, 10):
        known.update(series(), 1.06, FILL * 10.0 + SPACING + second)
    assert reading(known, 1.0).ratio == 1.0


def test_slow_drift_is_not_accepted() -> None:
    """A part that gets 1 % slower each day is flagged before it is 15 % slower."""
    known = learnt(jittered(1.0, 0.01, FILL))
    draw = random.Random(2)
    factor, flagged = 1.0, 0.0
    for quarter in range(40 * 96):
        factor = 1 + 0.01 * quarter / 96
        value = factor * draw.gauss(1, 0.01)
        ratio, limit = reading(known, value)
        if ratio >= limit:
            flagged = factor
            break
        known.update(series(), value, 10_000 + quarter * SPACING)
    assert 1.03 < flagged < 1.15


def test_faster_is_believed_at_once() -> None:
    """After a repair the baseline comes down within minutes, and judges a later fault."""
    known = learnt(jittered(1.3, 0.01, FILL))
    values = jittered(1.0, 0.01, ENOUGH + 8, seed=3)
    for number, value in enumerate(values):
        known.update(series(), value, 10_000 + number * 10.0)
    ratio, limit = reading(known, 1.15)
    assert ratio >= limit


@pytest.mark.parametrize(("number", "lowest"), [(63, math.inf), (64, 1.0)])
def test_the_lowest_median_is_one_of_many_values(number: int, lowest: float) -> None:
    """It takes sixty-four to be compared with for weeks."""
    known = learnt([1.0] * number)
    assert known._classes[series()].lowest == lowest


def test_new_part_is_judged_by_its_siblings() -> None:
    """A rail without a baseline is compared with three other rails or more, less strictly."""
    known = Baselines(OPTIONS)
    for part in "012":
        assert known.ratio(series("7"), 2.0) is None
        for number in range(ENOUGH):
            known.update(series(part), 0.9 + 0.2 * (number % 2), number)
    assert reading(known, 2.0, "7") == pytest.approx((2 / (1 + SIBLING_RATIO), 2.0703), abs=1e-3)
    assert known.ratio(series(""), 2.0) is None


def test_part_that_was_always_slow_is_found() -> None:
    """A rail that was slow from its first value is compared with its siblings, not with itself."""
    known = Baselines(OPTIONS)
    for number in range(FILL):
        for part in "0123":
            known.update(series(part), 1.4 if part == "3" else 1.0, number)
    ratio, limit = reading(known, 1.4, "3")
    assert ratio >= limit


@pytest.mark.parametrize("number", [ENOUGH, FILL - 1, FILL, 3 * FILL])
def test_nothing_changes_over_a_restart(number: int) -> None:
    """Each figure of a class comes back, also those that it has only after many values."""
    values = [round(value, 6) for value in jittered(0.01, 0.02, number)]
    known, again = learnt(values), Baselines(OPTIONS)
    content = known.document()
    assert not known.changed
    again.restore(json.loads(content))
    assert again.document() == content


@pytest.mark.parametrize(
    ("varies", "value", "faster"),
    [(0.0, 0.98, False), (0.0, 0.969, True), (0.02, 0.94, False), (0.02, 0.93, True)],
)
def test_by_how_much_a_part_must_become_faster(
    varies: float, value: float, *, faster: bool
) -> None:
    """Seven of eight values in a row by two standard deviations, and by 3 % where they hardly vary.
    They are too few to judge by yet.
    """
    for slow in (1, 2):
        known = learnt([1.0 - varies, 1.0 + varies] * (FILL // 2))
        for second, each in enumerate([1.0] * slow + [value] * (8 - slow)):
            known.update(series(), each, 1000.0 + second)
        assert (known.ratio(series(), 1.0) is None) is (faster and slow == 1)


@pytest.mark.parametrize(("days", "limit"), [(14, 1.05), (29, 1.05), (31, 1.2)])
def test_a_part_may_creep_by_five_per_cent_in_a_month(days: int, limit: float) -> None:
    """The lowest median counts for the rest of its half a month, and for the whole next one."""
    known, day = learnt([1.0] * FILL), 86400.0
    for quarter in range(days * 96):
        known.update(series(), 1.2, day / 96 * (quarter + 1))
    assert reading(known, 1.2).ratio == pytest.approx(1.2 / limit)


@pytest.mark.parametrize(("kind", "limit"), [("rail", 1 + OPTIONS.slow_ratio), ("light", 3.0)])
def test_echoes_vary_with_the_load(kind: str, limit: float) -> None:
    """One is flagged from three times its usual time on."""
    known = Baselines(OPTIONS)
    for number in range(FILL):
        known.update(series(kind=kind), 0.01, number)
    assert known.ratio(series(kind=kind), 0.01) == (1.0, limit)


def test_a_bounded_number_of_classes() -> None:
    """Of more than any node has, later ones are not learnt; those that are known are."""
    known = Baselines(OPTIONS)
    for number in range(2049):
        known.update(series(str(number)), 1.0, 0.0)
    assert len(known) == 2048
    known.changed = False
    known.update(series("0"), 1.0, 1.0)
    assert known.changed


def test_other_software_starts_anew() -> None:
    """Baselines of another software version are not used, and it is no error if there are none."""
    document = json.loads(learnt([1.0] * 30, stamp="torch 2.12").document())
    again, equal = Baselines(OPTIONS, "torch 2.13"), Baselines(OPTIONS, "torch 2.12")
    for found in (document, None):
        again.restore(found)
        equal.restore(found)
    assert (len(again), len(equal)) == (0, 1)


@pytest.mark.parametrize("classes", [
    [["rail"]],
    [["rail", "nccl", "x", 1, "", False, 0, *[None] * 3, [0.0]]],
    [["rail", "nccl", "x", 1, "", False, 0, *[None] * 3, ["1"]]],
    [["rail", "nccl", "x", 1, "", False, 0, *[None] * 3, []]],
    7,
    [7],
])  # fmt: skip
def test_file_of_another_shape(classes: object) -> None:
    """What is no time is not restored."""
    documents: list[object] = [{"stamp": "", "classes": classes}, {"stamp": ""}, {}, [], 7]
    for document in documents:
        known = Baselines(OPTIONS)
        with pytest.raises(SchemaError, match="baselines"):
            known.restore(document)
        assert len(known) == 0


@pytest.mark.parametrize(("seconds", "flagged"), [(0.19, False), (0.21, True)])
def test_echo_without_a_baseline_is_judged_by_lost_packets(
    seconds: float, *, flagged: bool
) -> None:
    """Where rounds are collectives, echoes are rare and not known: one in which TCP had to wait for
    a packet to be sent again is flagged.
    """
    ratio, limit = reading(Baselines(OPTIONS), seconds, kind="light")
    assert (ratio >= limit) is flagged
