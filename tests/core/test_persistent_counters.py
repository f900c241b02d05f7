"""Counts that outlive the agent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core import schema
from dshealthd.core.collector import counter
from dshealthd.core.persistent_counters import PersistentCounters, Row

FAULTS = counter("test_faults_total", "For the test.", "device", "code")
EVENTS = counter("test_events_total", "For the test.", "event")
WIDTHS = {FAULTS: 2, EVENTS: 1}
ROWS = schema.of(list[Row])


def test_tally_over_a_restart() -> None:
    """Rows go through JSON and back without a change. `changed` tells whether there is something to
    save.
    """
    tally = PersistentCounters(WIDTHS, 10)
    tally.count(FAULTS, "a", "1")
    tally.count(FAULTS, "a", "1")
    tally.put(7.5, EVENTS, "x")
    changes = [tally.changed]
    rows = ROWS.read(json.loads(json.dumps(tally.rows())), "rows")
    changes.append(tally.changed)
    assert changes == [True, False]
    again = PersistentCounters(WIDTHS, 10)
    again.restore(rows)
    assert list(again) == [(FAULTS, ("a", "1"), 2.0), (EVENTS, ("x",), 7.5)]


def test_limit() -> None:
    """Beyond the limit everything is counted as other, except what comes from a fixed list. No
    count is lost.
    """
    tally = PersistentCounters(WIDTHS, 3, fixed=(EVENTS,))
    for number in range(10):
        tally.count(FAULTS, "a", str(number))
    tally.count(EVENTS, "x")
    tally.count(FAULTS, "a", "0")
    assert {(metric, labels): value for metric, labels, value in tally} == {
        (FAULTS, ("a", "0")): 2,
        (FAULTS, ("a", "1")): 1,
        (FAULTS, ("a", "2")): 1,
        (FAULTS, ("", "other")): 7,
        (EVENTS, ("x",)): 1,
    }


@pytest.mark.parametrize("value", [-1, True, "1", None, float("nan"), float("inf"), 10**400])
def test_no_number(value: object) -> None:
    """What is no count is refused."""
    with pytest.raises(ValueError, match=r"."):
        ROWS.read([["test_events_total", ["x"], value]], "rows")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.just("test_events_total"),
        st.lists,
        max_leaves=12,
    )
)
def test_any_rows(rows: object) -> None:
    """Whatever a file holds, it is taken over as a whole or refused as a whole."""
    tally = PersistentCounters(WIDTHS, 10)
    tally.count(EVENTS, "x")
    try:
        tally.restore(ROWS.read(rows, "rows"))
    except ValueError:
        assert list(tally) == [(EVENTS, ("x",), 1.0)]
