"""Intervals, absence and reload, with collectors of the test's own and a clock that the test
moves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from dshealthd.collection.scheduler import Scheduler, _Inside, _Member, _Outside
from dshealthd.config import config, registry
from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    News,
    Sample,
    gauge,
)
from dshealthd.core.host import Host
from dshealthd.core.options import Duration, Errors
from dshealthd.core.result import not_available
from dshealthd.core.snapshot import Snapshot
from tests.jobs.machines import Clock

WAKE_SPACING = 5.0
RESTING = 5.0

COUNT = gauge("x_collections", "How often this was collected.")


class Counting(Collector):
    """Counts how often it is asked."""

    count = 0

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the count."""
        self.count += 1
        yield COUNT(float(self.count))


class Missing(Counting):
    """Something that this machine does not have."""

    @classmethod
    def absent(cls, options: Any, host: Host) -> str | None:  # noqa: ARG003 - the contract's
        """Say so."""
        return "no such thing"


def group(*kinds: type[Collector]) -> tuple[_Inside, Snapshot, Clock]:
    """Return collectors of an interval of 5 s as a group of the agent."""
    clock = Clock()
    snapshot = Snapshot(clock, clock)
    members = {
        kind.__name__: _Member(kind, CollectorOptions(interval=Duration(5)), clock.now)
        for kind in kinds
    }
    for name in members:
        snapshot.expect(name, 17)
    return (
        _Inside(members, snapshot, Context(host=Host(), monotonic=clock, wall=clock)),
        snapshot,
        clock,
    )


def asked(snapshot: Snapshot, name: str = "Counting") -> float:
    """Return how often a collector was asked."""
    return snapshot[name].result.samples[0].value


@pytest.mark.parametrize(("later", "expected", "due"), [
    ((4.9, 1.0), [1, 2], 1010.0),  # lateness does not shift the times that follow
    ((61.0, 0.0), [2, 2], 1065.0),  # nor is a minute caught up in which nothing ran
])  # fmt: skip
def test_interval_keeps_its_grid(later: tuple[float, ...], expected: list[int], due: float) -> None:
    """A collector is asked once an interval, whenever it could be."""
    inside, snapshot, clock = group(Counting)
    asyncio.run(inside.once())
    counts = []
    for seconds in later:
        clock.now += seconds
        asyncio.run(inside.once())
        counts.append(asked(snapshot))
    assert counts == expected
    assert inside.members["Counting"].due == due


async def test_state_is_read_of_those_that_keep_it(tmp_path: Path) -> None:
    """Of no other, as each costs a process; an agent that must leave no trace reads none. A
    collector that asks for its state is told why there is none.
    """
    clock, place = Clock(), tmp_path / "kernel_log.json"
    place.write_text("{}")
    for state, found in ((tmp_path, {str(place): "{}"}), (None, {})):
        scheduler = Scheduler(Snapshot(clock, clock), clock, clock, state)
        assert await scheduler._saved(["memory", "kernel_log"]) == found
    place.unlink()
    place.mkdir()
    saved = await Scheduler(Snapshot(clock, clock), clock, clock, tmp_path)._saved(["kernel_log"])
    inside = scheduler._group(None, {"memory": CollectorOptions()}, config.Config(), saved)
    with pytest.raises(IsADirectoryError):
        inside._context.read_state(str(place))


def test_groups_that_start_apart_are_due_together() -> None:
    """Each wake-up finds cold caches, so all processes are woken at the same moments."""
    first, _, clock = group(Counting)
    asyncio.run(first.once())
    clock.now += 2.4
    second, _, later = group(Counting)
    later.now = clock.now
    asyncio.run(second.once())
    assert first.members["Counting"].due == second.members["Counting"].due == 1005.0


@pytest.mark.parametrize(("interval", "age"), [(5, 17), (2, 8), (1, 7)])
def test_samples_expire_by_their_interval(interval: int, age: int) -> None:
    """After three intervals without a result and its deadline, or as long as a source may rest."""
    inside, snapshot, clock = group(Counting, Missing)
    for member in inside.members.values():
        member.options = CollectorOptions(interval=Duration(interval))
    asyncio.run(inside.once())
    assert snapshot["Missing"].expires_after == 17
    assert snapshot["Counting"].expires_after == age
    clock.now += age
    assert snapshot.samples(snapshot["Counting"])
    clock.now += 0.1
    assert not snapshot.samples(snapshot["Counting"])


class Announced(Counting):
    """Has a descriptor that says when there is something new."""

    pipe: ClassVar[tuple[int, int]]

    @property
    def descriptor(self) -> int:
        """The pipe's end."""
        return self.pipe[0]


async def test_a_source_that_announces_what_is_new_is_not_polled() -> None:
    """Then it is collected at once, but no more often than its interval says."""
    Announced.pipe = os.pipe()
    try:
        inside, snapshot, clock = group(Announced)
        member = inside.members["Announced"]
        member.options = CollectorOptions(interval=Duration(1))
        await inside.once()
        assert member.next == clock.now + RESTING
        clock.now += 0.25
        os.write(Announced.pipe[1], b"new")
        while member.next == 1000 + RESTING:
            await asyncio.sleep(0)
        assert member.next == 1001.0  # a quarter of a second after it was collected
        clock.now = 1003.0
        await inside.once()
        assert asked(snapshot, "Announced") == 2
        assert member.due == 1010.0  # the next on the grid
        clock.now = 1004.5
        while member.next == 1010.0:
            await asyncio.sleep(0)
        assert member.next == 1004.5  # more than an interval later
        await inside.close()
    finally:
        for end in Announced.pipe:
            os.close(end)


async def test_a_file_that_cannot_announce_is_polled(tmp_path: Path) -> None:
    """As a kernel log in a test is."""
    file = (tmp_path / "log").open("wb")
    with file:
        Announced.pipe = file.fileno(), -1
        inside, _, _ = group(Announced)
        inside.members["Announced"].options = CollectorOptions(interval=Duration(1))
        await inside.once()
        assert inside.members["Announced"].next == 1001.0


def test_what_is_absent_is_not_asked_for_every_second() -> None:
    """An interval below that of all others would wake the agent for nothing. It is not run, and
    shows as not available with the reason; the others are run.
    """
    inside, snapshot, clock = group(Counting, Missing)
    inside.members["Missing"].options = CollectorOptions(interval=Duration(1))
    asyncio.run(inside.once())
    assert inside.members["Missing"].next == clock.now + RESTING
    assert snapshot["Missing"].result == not_available("no such thing")
    assert asked(snapshot) == 1


@pytest.mark.parametrize(("kinds", "closed"), [((Missing,), True), ((Counting, Missing), False)])
async def test_a_worker_that_is_not_needed(
    kinds: tuple[type[Collector], ...], *, closed: bool
) -> None:
    """It ends once none of its collectors has a source."""
    inside, snapshot, _ = group(*kinds)
    calls = list[str]()

    async def close() -> None:
        calls.append("close")

    supervisor: Any = SimpleNamespace(close=close)
    await _Outside(inside.members, snapshot, inside._context, supervisor).rest()
    assert calls == ["close"] * closed


class Listening(Counting):
    """Is collected when an NVLink changes."""

    wakes_on = frozenset({News.NVLINK})


def test_news_wakes_who_waits_for_it() -> None:
    """Who waits for news is collected at once, the others are not, and all keep their grid."""
    inside, snapshot, clock = group(Counting, Listening)
    asyncio.run(inside.once())
    clock.now += 1
    inside.notify(News.GPU_MEMORY)
    asyncio.run(inside.once())
    assert (asked(snapshot), asked(snapshot, "Listening")) == (1, 1)
    inside.notify(News.NVLINK)
    asyncio.run(inside.once())
    assert (asked(snapshot), asked(snapshot, "Listening")) == (1, 2)
    asyncio.run(inside.once())
    assert asked(snapshot, "Listening") == 2
    assert {member.due for member in inside.members.values()} == {1005.0}
    clock.now = 1005.0
    asyncio.run(inside.once())
    assert (asked(snapshot), asked(snapshot, "Listening")) == (2, 3)


def test_a_request_is_answered_at_once() -> None:
    """Who is asked for is collected however recently it was, the others are not, and all keep their
    grid.
    """
    inside, snapshot, clock = group(Counting, Listening)
    scheduler = Scheduler(snapshot, clock, clock)
    scheduler._groups = {None: (inside, None, None)}  # type: ignore[dict-item]
    asyncio.run(inside.once())
    for _ in range(3):
        scheduler.collect(["Listening", "Unknown"])
        asyncio.run(inside.once())
    assert (asked(snapshot), asked(snapshot, "Listening")) == (1, 4)
    assert {member.due for member in inside.members.values()} == {1005.0}


def test_news_says_what_it_is_about() -> None:
    """The collection that news brought has the news, and the next one has not; what comes while
    none is allowed yet is not lost.
    """
    inside, _, clock = group(Listening)
    seen = []

    async def once() -> None:
        await inside.once()
        seen.append(inside._context.heard)

    asyncio.run(once())
    clock.now += 1
    inside.notify(News.NVLINK, "slurm-1")
    inside.notify(News.GPU_MEMORY, "slurm-2")
    asyncio.run(once())
    inside.notify(News.NVLINK, "slurm-3")
    clock.now = 1006.0  # also due by its interval
    asyncio.run(once())
    clock.now = 1010.0
    asyncio.run(once())
    assert seen == [
        frozenset(),
        {(News.NVLINK, "slurm-1")},
        {(News.NVLINK, "slurm-3")},
        frozenset(),
    ]


def test_a_flood_of_news_costs_one_collection_in_five_seconds() -> None:
    """News a hundred times a second for a minute: one collection every five seconds, none lost."""
    inside, snapshot, clock = group(Listening)
    inside.members["Listening"].options = CollectorOptions(interval=Duration(3600))
    asyncio.run(inside.once())
    for _ in range(600):
        clock.now += 0.1
        inside.notify(News.NVLINK)
        asyncio.run(inside.once())
    assert 1 + 12 <= asked(snapshot, "Listening") <= 1 + 13
    clock.now += WAKE_SPACING  # the last one was not answered yet, and is
    asyncio.run(inside.once())
    before = asked(snapshot, "Listening")
    clock.now += WAKE_SPACING
    asyncio.run(inside.once())
    assert asked(snapshot, "Listening") == before


async def test_news_ends_the_sleep() -> None:
    """A group that sleeps until its next collection, in an hour, collects as soon as there is
    news.
    """
    inside, snapshot, _ = group(Listening)
    inside.members["Listening"].options = CollectorOptions(interval=Duration(3600))
    task = asyncio.create_task(inside.run())
    async with asyncio.timeout(60):
        while not snapshot["Listening"].result.samples:
            await asyncio.sleep(0)
        assert asked(snapshot, "Listening") == 1
        inside.notify(News.NVLINK)
        while asked(snapshot, "Listening") < 2:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_reload_keeps_what_it_does_not_change() -> None:
    """Applying an equal configuration again leaves the running group alone. Disabling everything
    ends it.
    """
    clock = Clock()
    snapshot = Snapshot(clock, clock)
    scheduler = Scheduler(snapshot, clock, clock)
    only: dict[str, dict[str, Any]]
    only = {name: {"enabled": name == "memory"} for name in registry.all_collectors()}
    only["memory"]["interval"] = "60s"
    loaded = config.from_document({"collectors": only}, errors := Errors())
    assert not errors
    await scheduler.apply(loaded)
    before = dict(scheduler._groups)
    await asyncio.sleep(0)
    await scheduler.apply(loaded)
    assert scheduler._groups == before
    assert snapshot["memory"].expires_after == 3 * 60 + 2, "it is not read again before"
    only["filesystem"]["enabled"] = True
    await scheduler.apply(config.from_document({"collectors": only}, errors))
    only["filesystem"]["enabled"] = only["memory"]["enabled"] = False
    await scheduler.apply(config.from_document({"collectors": only}, errors))
    assert (scheduler._groups, [*snapshot]) == ({}, []), "one may collect while another ends"
    await scheduler.close()
