"""The soak's verdict: that growth is found, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.soak.__main__ import until_well
from tests.soak.invariants import MAX_SERIES_GROWTH, Quiet, Record
from tests.soak.node import node

LIMIT = round(1200 * (1 + MAX_SERIES_GROWTH))
"""Series that may be shown at the end of a soak whose reference moment has 1,200."""


def soaked(**last: Any) -> Record:
    """Return the record of an hour without growth but for what is given of its last moments."""
    record = Record()
    still = Quiet(0.0, memory=46.0, descriptors=22, threads=3, children=2, series=1200)
    for minute in range(60):
        moment = dataclasses.replace(still, hours=minute / 60)
        record.quiet.append(dataclasses.replace(moment, **last) if minute >= 30 else moment)
    return record


def test_no_growth() -> None:
    """A soak without growth, or with as many series more as Xids and jobs bring, passes."""
    for record in (soaked(), soaked(series=LIMIT)):
        record.growth()
        assert record.broken == []


@pytest.mark.parametrize(("name", "last", "said"), [
    ("series", LIMIT + 1, "series grew from 1200 to 1501"),
    ("descriptors", 23, "descriptors grew from 22 to 23"),
    ("threads", 4, "threads grew from 3 to 4"),
    ("children", 3, "children grew from 2 to 3"),
    ("memory", 54.5, "memory grew by 8.5 MiB"),
])  # fmt: skip
def test_growth(name: str, last: float, said: str) -> None:
    """Growth that is real fails the verdict."""
    record = soaked(**{name: last})
    record.growth()
    assert len(record.broken) == 1
    assert said in record.broken[0]


@pytest.mark.parametrize(("memory", "said"), [
    ((46.0, 46.3, 46.6, 46.9), "memory grows by 0.30 MiB/h"),
    ((60.0, 46.0, 56.0, 56.0, 56.0, 56.0, 54.5), "memory grew by 8.5 MiB"),
], ids=["slope", "in all"])  # fmt: skip
def test_memory_over_hours(memory: tuple[float, ...], said: str) -> None:
    """From two hours on memory is judged by its slope over the whole soak; too much in all fails a
    soak of any length.
    """
    record = Record()
    for hour, size in enumerate(memory):
        record.quiet.append(
            Quiet(float(hour), size, descriptors=22, threads=3, children=2, series=1200)
        )
    record.growth()
    assert len(record.broken) == 1
    assert said in record.broken[0]


def test_healthy_node_is_quiet(tmp_path: Path) -> None:
    """A node without a fault comes to moments that can be compared: what is off is not waited
    for.
    """
    record = Record()
    with node(tmp_path) as made:
        until_well(made, record)
    assert record.quiet, record.broken
