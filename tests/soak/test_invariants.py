"""The soak's verdict: between which moments growth is judged, and that growth is found."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, cast

import pytest

from tests.agents import Scrape
from tests.soak.__main__ import until_well
from tests.soak.invariants import DEVICE_COLLECTORS, MAX_SERIES_GROWTH, Quiet, Record, is_quiet
from tests.soak.node import GPUS, node

if TYPE_CHECKING:
    from pathlib import Path

    from tests.soak.node import Node

SLOW_COLLECTORS = ("ecc", "gpu_processes", "mig", "nvlink", "nvlink_domain", "pcie")
"""Those that read every 15 s, where `gpu` reads every 5."""
LIMIT = round(1200 * (1 + MAX_SERIES_GROWTH))
"""Series that may be shown at the end of a soak whose reference moment has 1,200."""


def text(
    *, down: tuple[str, ...] = (), unread: tuple[str, ...] = (), read: float | None = None
) -> str:
    """Return what a node says whose GPUs are all up, with these collectors down or not yet read.

    `read` is the Unix time at which a collection of GPUs ended that took 2 s; a minute from now if
    not given.
    """
    at = time.time() + 60 if read is None else read
    lines = [
        'dshealthd_worker_stuck{worker="device"} 0',
        f'dshealthd_collector_last_success_timestamp_seconds{{collector="gpu"}} {at}',
        'dshealthd_collector_duration_seconds{collector="gpu"} 2',
    ]
    for gpu in range(GPUS):
        lines.append(f'dshealthd_gpu_up{{gpu="{gpu}"}} 1')
        lines.append(f'dshealthd_gpu_power_watts{{gpu="{gpu}"}} 70')
    for name in sorted({*DEVICE_COLLECTORS, "memory"} - set(unread)):
        lines.append(f'dshealthd_collector_up{{collector="{name}"}} {int(name not in down)}')
        if name not in down:
            lines += [f'dshealthd_{name}{{gpu="{gpu}"}} 5' for gpu in range(GPUS)]
    return "\n".join(lines)


UP, POWER = 'dshealthd_gpu_up{gpu="3"} 1', 'dshealthd_gpu_power_watts{gpu="3"} 70'
STUCK = 'dshealthd_worker_stuck{worker="device"} '
TROUBLES = {
    **{f"{name} is down": text(down=(name,)) for name in (*SLOW_COLLECTORS, "memory")},
    **{f"{name} was not read yet": text(unread=(name,)) for name in SLOW_COLLECTORS},
    "a GPU is down": text().replace(UP, f"{UP[:-1]}0"),
    "a GPU is unknown": text().replace(UP, ""),
    "a GPU has no samples": text().replace(POWER, ""),
    "a worker is stuck": text().replace(f"{STUCK}0", f"{STUCK}1"),
}


def test_all_up() -> None:
    """A moment at which all GPUs and collectors are up is one to compare."""
    assert all(line in text() for line in (UP, POWER, f"{STUCK}0"))
    assert is_quiet(Scrape(text(), 0.0))


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble(trouble: str) -> None:
    """What leaves series out, or is a fault that lasts, makes a moment none to compare."""
    assert not is_quiet(Scrape(TROUBLES[trouble], 0.0))


def test_gpus_were_read_before_the_fault_was_over() -> None:
    """What the collection that was under way then met may bring a GPU down afterwards."""
    end = time.time()
    for read, quiet in ((end - 5, False), (end + 1, False), (end + 3, True)):
        assert is_quiet(Scrape(text(read=read), 0.0), end) is quiet
    unread = text().replace("dshealthd_collector_last_success", "other")
    assert not is_quiet(Scrape(unread, 0.0), end)


class ScriptedAgent:
    """Answers with one text after the other; its process is this one."""

    def __init__(self, texts: list[str]) -> None:
        self.pid = os.getpid()
        self._texts = texts

    def scrape(self, _timeout: float) -> Scrape:
        """Return the next answer."""
        return Scrape(self._texts.pop(0), 0.0)

    def workers(self) -> list[int]:
        """Return no children."""
        return []


@dataclasses.dataclass
class ScriptedNode:
    """A node of which only the agent is asked."""

    agent: ScriptedAgent


def test_moment_after_a_driver_fault() -> None:
    """Series are counted when all collectors are up again, not as soon as the GPUs are."""
    partly = text(down=SLOW_COLLECTORS)
    node = ScriptedNode(ScriptedAgent([partly, text()]))
    record = Record()
    until_well(cast("Node", node), record)
    assert [moment.series for moment in record.quiet] == [len(text().splitlines())]
    assert len(text().splitlines()) > len(partly.splitlines()) * (1 + MAX_SERIES_GROWTH)
    assert record.broken == []


def soaked(**last: float) -> Record:
    """Return the record of an hour without growth but for what is given of its last moments."""
    record = Record()
    still = Quiet(0.0, memory=46.0, descriptors=22, threads=3, children=2, series=1200)
    for minute in range(60):
        moment = dataclasses.replace(still, hours=minute / 60)
        # fields of it
        record.quiet.append(dataclasses.replace(moment, **last) if minute >= 30 else moment)  # type: ignore[arg-type]
    return record


def test_no_growth() -> None:
    """A soak without growth, or with as many series more as Xids and jobs bring, passes."""
    for record in (soaked(), soaked(series=LIMIT)):
        record.growth()
        assert record.broken == []


@pytest.mark.parametrize(
    ("name", "last", "said"),
    [
        ("series", LIMIT + 1, "series grew from 1200 to 1501"),
        ("descriptors", 23, "descriptors grew from 22 to 23"),
        ("threads", 4, "threads grew from 3 to 4"),
        ("children", 3, "children grew from 2 to 3"),
        ("memory", 54.5, "memory grew by 8.5 MiB"),
    ],
)
def test_growth(name: str, last: float, said: str) -> None:
    """Growth that is real fails the verdict."""
    record = soaked(**{name: last})
    record.growth()
    assert len(record.broken) == 1
    assert said in record.broken[0]


def over_hours(*memory: float) -> Record:
    """Return the record of a soak with so many MiB at each hour."""
    record = Record()
    for hour, size in enumerate(memory):
        record.quiet.append(
            Quiet(float(hour), size, descriptors=22, threads=3, children=2, series=1200)
        )
    return record


def test_memory_over_hours() -> None:
    """From two hours on memory is judged by its slope over the whole soak."""
    record = over_hours(46.0, 46.3, 46.6, 46.9)
    record.growth()
    assert len(record.broken) == 1
    assert "memory grows by 0.30 MiB/h" in record.broken[0]


def test_memory_grown_too_much_over_hours() -> None:
    """Too much in all fails a soak of any length, whatever the slope."""
    record = over_hours(60.0, 46.0, *[56.0] * 4, 54.5)
    record.growth()
    assert [what.partition(": ")[2] for what in record.broken] == ["memory grew by 8.5 MiB"]


def test_healthy_node_is_quiet(tmp_path: Path) -> None:
    """A node without a fault comes to moments that can be compared: what is off is not waited
    for.
    """
    record = Record()
    with node(tmp_path) as made:
        until_well(made, record)
    assert record.quiet, record.broken
