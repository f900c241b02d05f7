"""Counts that outlive the agent within a boot: the file and what is in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core.collector import counter
from dshealthd.core.counter_file import CounterFile, PersistentCounters

FAULTS = counter("test_faults_total", "For the test.", "device", "code")
EVENTS = counter("test_events_total", "For the test.", "event")
WIDTHS = {FAULTS: 2, EVENTS: 1}


def test_saved_and_loaded(tmp_path: Path) -> None:
    """What was saved is loaded by the same boot, and by no other."""
    assert CounterFile(tmp_path, "x", "boot 1").load() is None
    ledger = CounterFile(tmp_path, "x", "boot 1")
    ledger.save({"position": 5})
    assert ledger.writer.wait(60.0)
    assert CounterFile(tmp_path, "x", "boot 1").load() == {"boot_id": "boot 1", "position": 5}
    assert CounterFile(tmp_path, "x", "boot 2").load() is None
    assert os.listdir(tmp_path) == ["x.json"]


def test_old_file_stays(tmp_path: Path) -> None:
    """When the new file cannot be put in place, the old one is as it was."""
    ledger = CounterFile(tmp_path, "x", "boot")
    ledger.save({"position": 1})
    assert ledger.writer.wait(60.0)
    (tmp_path / "x.json.new").mkdir()
    ledger.save({"position": 2})
    assert ledger.writer.wait(60.0)
    assert ledger.writer.error is not None
    assert ledger.load() == {"boot_id": "boot", "position": 1}
    (tmp_path / "x.json.new").rmdir()
    ledger.save({"position": 2})
    assert ledger.writer.wait(60.0)
    assert ledger.load() == {"boot_id": "boot", "position": 2}


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"boot_id": 1}', "[" * 100_000])
def test_broken_file(tmp_path: Path, content: str) -> None:
    """What is no state is a ValueError, not an empty state."""
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"."):
        CounterFile(tmp_path, "x", "boot").load()


def test_tally_over_a_restart() -> None:
    """Rows go through JSON and back without a change. `changed` tells whether there is something to
    save.
    """
    tally = PersistentCounters(WIDTHS, 10)
    tally.count(FAULTS, "a", "1")
    tally.count(FAULTS, "a", "1")
    tally.put(7.5, EVENTS, "x")
    changes = [tally.changed]
    rows = json.loads(json.dumps(tally.rows()))
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
        PersistentCounters(WIDTHS, 10).restore([["test_events_total", ["x"], value]])


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
        tally.restore(rows)
    except ValueError:
        assert list(tally) == [(EVENTS, ("x",), 1.0)]
