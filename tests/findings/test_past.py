"""The past of series: rises, extremes and means of windows."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core import documents
from dshealthd.findings.past import Measure, Past, Window

MAX_FIGURE = 1e100
MAX_SERIES = 2048

A, B = ("a",), ("b",)


def test_rise_adds_up_over_resets() -> None:
    """A counter that restarts at 0 loses nothing of what it had counted."""
    window = Window(Measure.RISE, 60.0)
    for now, value in enumerate((100.0, 103.0, 1.0, 2.0)):
        window.add(float(now), [(A, value)])
    assert dict(window.values()) == {A: 5.0}


def test_first_series_of_a_name_may_have_counted_for_years() -> None:
    """What stood there at the first look did not rise; a type of error that is new later did."""
    window = Window(Measure.RISE, 60.0)
    window.add(0.0, [(A, 13_312.0)])
    window.add(5.0, [(A, 13_312.0), (B, 2.0)])
    assert dict(window.values()) == {A: 0.0, B: 2.0}


def test_counter_that_exists_from_its_first_event_on() -> None:
    """Such a counter rose from 0, but not one that an agent finds right after its start."""
    window = Window(Measure.RISE, 60.0, from_zero=True)
    window.add(0.0, [])
    window.add(1.0, [(A, 7.0)])
    assert dict(window.values()) == {A: 0.0}
    later = Window(Measure.RISE, 60.0, from_zero=True)
    later.dimensions = ("type",)
    later.add(0.0, [])
    later.add(30.0, [(A, 7.0)])
    assert dict(later.values()) == {A: 7.0}
    restored = Window(Measure.RISE, 60.0, from_zero=True)
    restored.restore(json.loads(json.dumps(later.document())), 30.0, 30.0)
    restored.add(100.0, [])
    restored.add(101.0, [(B, 3.0)])
    assert dict(restored.values()) == {B: 3.0}  # the agent before had seen that there was none


def test_rise_leaves_the_window() -> None:
    """A rise is forgotten when the window has passed it, to within a step."""
    window = Window(Measure.RISE, 300.0)
    window.add(0.0, [(A, 0.0)])
    for now in range(5, 700, 5):
        window.add(float(now), [(A, 4.0)])
        (rise,) = dict(window.values()).values()
        assert rise == 4.0 if now <= 300 else True
        assert rise == 0.0 if now > 320 else True


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200))
def test_rise_is_that_of_all_values_within_a_step(steps: list[int]) -> None:
    """The rise of a window is at least that of its length, at most that of a step more."""
    window, total, history = Window(Measure.RISE, 60.0), 0.0, []
    for place, step in enumerate(steps):
        total += step
        history.append(total)
        window.add(5.0 * place, [(A, total)])
    (rise,) = dict(window.values()).values()
    within = history[max(0, len(steps) - 1 - 12)]
    beyond = history[max(0, len(steps) - 1 - 14)]
    assert total - within <= rise <= total - beyond


@pytest.mark.parametrize(("kind", "value"), [
    (Measure.HIGHEST, 9.0),
    (Measure.LOWEST, 1.0),
    (Measure.MEAN, 4.0),
    (Measure.MEDIAN, 3.0),
    (Measure.USUAL, 3.0),
])  # fmt: skip
def test_figures_of_a_window(kind: Measure, value: float) -> None:
    """A window has the highest, lowest, mean or median value, also of a series that is gone."""
    window = Window(kind, 60.0)
    for now, seen in enumerate((3.0, 9.0, 1.0, 3.0)):
        window.add(2.0 * now, [(A, seen)])
    window.add(8.0, [])
    assert dict(window.values()) == {A: value}
    window.add(70.0, [])
    assert dict(window.values()) == {}


def test_moment_counts_once() -> None:
    """Two rules that ask for the same window at one moment do not count its values twice."""
    window = Window(Measure.MEAN, 60.0)
    window.add(0.0, [(A, 1.0)])
    window.add(1.0, [(A, 4.0)])
    window.add(1.0, [(A, 400.0)])
    assert dict(window.values()) == {A: 2.5}


def test_series_are_bounded() -> None:
    """Labels that somebody multiplies take no memory without end."""
    window = Window(Measure.RISE, 60.0)
    window.add(0.0, [((str(number),), 1.0) for number in range(MAX_SERIES + 50)])
    assert len(dict(window.values())) == MAX_SERIES


def test_unknown_is_no_value() -> None:
    """A value that is not a number is left out."""
    window = Window(Measure.HIGHEST, 60.0)
    window.add(0.0, [(A, float("nan")), (B, float("inf"))])
    assert dict(window.values()) == {}


@pytest.mark.parametrize("kind", list(Measure))
def test_past_outlives_the_agent(kind: Measure) -> None:
    """A restarted agent goes on with the windows, whose ages grow meanwhile."""
    past, later, whole = Past(), Past(), Past()
    for now, value in enumerate((1.0, 5.0, 3.0)):
        for each in (past, whole):
            window = each.window(kind, "x_total", 60.0, {"type": ("b", "a")})
            window.dimensions = ("type",)
            window.add(float(now), [(A, value)])
    document = json.loads(json.dumps(past.document(2.0)))
    later.restore(document, 2.0, 1002.0)
    mine = later.window(kind, "x_total", 60.0, {"type": ("a", "b")})
    assert mine.dimensions == ("type",)
    mine.add(1010.0, [(A, 4.0)])
    other = whole.window(kind, "x_total", 60.0, {"type": ("a", "b")})
    other.add(10.0, [(A, 4.0)])
    assert dict(mine.values()) == dict(other.values())


def test_of_a_boot_ago_only_days_are_known() -> None:
    """How the node was is remembered, and not what had just happened to it."""
    past, later = Past(), Past()
    for seconds in (3600.0, 86399.0, 86400.0, 604800.0):
        window = past.window(Measure.HIGHEST, "x", seconds, {})
        window.dimensions = ("type",)
        window.add(0.0, [(A, 7.0)])
    later.restore(past.document(0.0), 0.0, 0.0, booted=True)
    assert [
        dict(later.window(Measure.HIGHEST, "x", seconds, {}).values())
        for seconds in (3600.0, 86399.0, 86400.0, 604800.0)
    ] == [{}, {}, {A: 7.0}, {A: 7.0}]


def test_past_that_nobody_has_asked_for_yet_outlives_a_second_restart() -> None:
    """Some windows are asked for under a condition: the file keeps them for their length."""
    first, second, third = Past(), Past(), Past()
    window = first.window(Measure.HIGHEST, "x", 60.0, {})
    window.dimensions = ("type",)
    window.add(0.0, [(A, 7.0)])
    second.restore(first.document(0.0), 0.0, 0.0)
    third.restore(second.document(10.0), 10.0, 10.0)
    assert dict(third.window(Measure.HIGHEST, "x", 60.0, {}).values()) == {A: 7.0}
    assert third.document(71.0) == {}


def rows(*series: object) -> dict[str, object]:
    """Return a window as a state file has it."""
    return {"dimensions": ["type"], "series": list(series)}


@pytest.mark.parametrize("window", [
    rows(["a"]),
    rows([["a"], "x", []]),
    rows([["a"], 1.0, [1.0]]),
    rows([["a"], 1.0, [float("nan"), 1.0]]),
    rows([["a", "b"], 1.0, [1.0, 1.0]]),
    {"series": []},
    [[["a"], 1.0, [1.0, 1.0]]],
    5,
])  # fmt: skip
def test_invalid_past_is_refused(window: object) -> None:
    """A state file with other content restores nothing of the past."""
    past = Past()
    with pytest.raises((KeyError, ValueError, TypeError)):
        past.restore({"rise x_total 60 ": window}, 0.0, 0.0)
    assert past.document(0.0) == {}


def test_peak_does_not_learn_a_fault() -> None:
    """What a series had at best stays for as long as it is seen, and for a while after that."""
    window = Window(Measure.PEAK, 60.0)
    window.dimensions = ("gpu",)
    for now, value in ((0.0, 18.0), (5.0, 17.0), (1000.0, 17.0), (1050.0, 16.0)):
        window.add(now, [(A, value)])
        assert dict(window.values()) == {A: 18.0}
    restored = Window(Measure.PEAK, 60.0)
    restored.restore(json.loads(json.dumps(window.document())), 1050.0, 50.0)
    restored.add(100.0, [])
    assert dict(restored.values()) == {A: 18.0}
    restored.add(113.0, [])
    assert dict(restored.values()) == {}


def test_what_is_usual_does_not_learn_a_fault() -> None:
    """Once a series is known for the whole window, values far above its median change nothing.
    Before that, whatever it shows is usual.
    """
    window = Window(Measure.USUAL, 60.0)
    window.within = 1.5
    values = [(2.0 * step, 9.0 if step < 10 else 1.0) for step in range(40)]
    for now, value in values:
        window.add(now, [(A, value)])
    assert dict(window.values()) == {A: 1.0}
    for step in range(40, 200):
        window.add(2.0 * step, [(A, 3.0)])
    assert dict(window.values()) == {A: 1.0}
    for step in range(200, 240):
        window.add(2.0 * step, [(A, 1.2)])
    assert dict(window.values()) == {A: 1.2}


def test_a_level_that_lasts_for_a_day_is_usual() -> None:
    """A series begins anew after a day far above its usual, over a restart, too; not one that has
    been back in between.
    """
    window = Window(Measure.USUAL, 3600.0)
    window.within, window.dimensions = 1.5, ("gpu",)
    now = 0.0

    def play(value: float, hours: float) -> dict[tuple[str, ...], float]:
        nonlocal now
        end = now + hours * 3600.0
        while now < end:
            now += 120.0
            window.add(now, [(A, value)])
        return dict(window.values(now))

    assert play(1.0, 2) == {A: 1.0}
    assert play(3.0, 20) == {A: 1.0}
    assert play(1.0, 0.1) == {A: 1.0}
    assert play(3.0, 20) == {A: 1.0}
    document = json.loads(json.dumps(window.document()))
    window = Window(Measure.USUAL, 3600.0)
    window.within = 1.5
    window.restore(document, now, now)
    assert play(3.0, 3.5) == {A: 1.0}
    assert play(3.0, 1) == {}
    assert play(3.0, 1) == {A: 3.0}


@pytest.mark.parametrize("kind", Measure)
def test_figures_beyond_all_sources_are_no_values(kind: Measure) -> None:
    """A window of the largest figures can be kept, and one figure more makes none infinite."""
    window = Window(kind, 60.0)
    for now in range(10):
        window.add(float(now), [(A, MAX_FIGURE), (B, math.nextafter(MAX_FIGURE, math.inf))])
    assert set(dict(window.values())) == {A}
    assert all(map(math.isfinite, dict(window.values()).values()))
    documents.dumps(window.document())
