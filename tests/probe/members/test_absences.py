"""Members in maintenance: until when an announcement counts, and whom a node tells of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from dshealthd.core.snapshot import Snapshot
from dshealthd.core.state_writer import StateFile, wait_until_written
from dshealthd.probe.members.absences import Absences
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.protocol import PeerError
from tests.probe.peering import PATIENT
from tests.probe.services import set_maintenance, snapshot
from tests.waiting import eventually

NOW = 1_800_000_000.0
DAY = 86400.0


class Clock:
    """Unix time, set by the test."""

    now = NOW

    def __call__(self) -> float:
        """Return it."""
        return self.now


def of(
    shot: Snapshot | None = None, clock: Clock | None = None, state: Path | None = None
) -> Absences:
    """Return the absences that an agent knows, which keeps them where `state` is."""
    return Absences(shot or snapshot(), clock or Clock(), StateFile(state, "absences", 1 << 16))


@pytest.mark.parametrize(
    ("lasts", "after", "absent"),
    [
        (0.0, 0.0, False),
        (1.0, 0.0, True),
        (600.0, 599.0, True),
        (600.0, 600.0, False),
        (40 * DAY, 31 * DAY - 1, True),
        (40 * DAY, 31 * DAY, False),
    ],
)
def test_an_announcement_counts_until_its_end(lasts: float, after: float, *, absent: bool) -> None:
    """At most for a month: a wrong clock removes no member for ever."""
    clock = Clock()
    known = of(clock=clock)
    known.record("a", NOW + lasts)
    clock.now += after
    assert known.absent("a") is absent
    assert not known.absent("b")


def test_an_end_in_the_past_is_the_end() -> None:
    """As is the removal of the member, whoever else is absent."""
    known = of()
    for name in "abc":
        known.record(name, NOW + 600)
    known.record("a", NOW)
    known.forget("ac")
    assert [name for name in "abc" if known.absent(name)] == ["c"]


async def test_announcements_outlast_the_agent(tmp_path: Path) -> None:
    """Who is down for maintenance cannot repeat its announcement to an agent that starts again."""
    clock, known = Clock(), of(state=tmp_path)
    for name, end in (("a", 600.0), ("b", 60.0), ("c", 600.0), ("c", 0.0)):
        known.record(name, NOW + end)
    assert await wait_until_written(PATIENT) == []
    clock.now += 300
    later = of(clock=clock, state=tmp_path)
    await later.restore()
    assert later.names() == ["a"]
    clock.now += 300
    assert later.names() == []


@pytest.mark.parametrize("content", ["", "[]", '{"ends": 7}', '{"ends": {"a": "b"}}', "{"])
async def test_a_file_that_is_not_this_release_s(tmp_path: Path, content: str) -> None:
    """It costs what it holds, and no more."""
    (tmp_path / "absences.json").write_text(content)
    known = of(state=tmp_path)
    await known.restore()
    assert known.names() == []


@pytest.mark.parametrize(("end", "found"), [(NOW, 0.0), (NOW + 1, NOW + 1), (0.0, 0.0)])
def test_own_maintenance(end: float, found: float) -> None:
    """It is over at its end, whenever the collector runs again."""
    shot = snapshot()
    set_maintenance(shot, end)
    assert of(shot).own_end() == found


async def test_a_member_that_does_not_answer_is_told_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others once, until the end changes. It looks each second."""
    waits, sleep = [], asyncio.sleep

    async def soon(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0.001)

    monkeypatch.setattr(asyncio, "sleep", soon)
    calls: list[tuple[str, float]] = []

    class Peers:
        """Reaches everybody but one."""

        async def call(self, name: str, _what: str, body: dict[str, Any]) -> None:
            """Record the announcement."""
            calls.append((name, body["end"]))
            if name == "gone":
                raise PeerError(Outcome.UNREACHABLE, "timeout")

    shot = snapshot()
    announcing = asyncio.create_task(
        of(shot).keep_announcing(cast("Any", Peers()), lambda: ["a", "gone", "b"])
    )
    try:
        for end in (NOW + 600, NOW + 900):
            set_maintenance(shot, end)
            await eventually(lambda end=end: calls.count(("gone", end)) == 3)  # type: ignore[misc]
            await sleep(0.05)
            told = sorted(name for name, said in calls if said == end)
            assert told == ["a", "b", "gone", "gone", "gone"]
    finally:
        announcing.cancel()
    assert waits.count(1.0) > 4
