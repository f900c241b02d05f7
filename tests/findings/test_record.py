"""The node's record: what it keeps, for how long, and what a broken file or a wrong clock does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collectors.gpu import DRIVER
from dshealthd.collectors.gpu import UTILIZATION as BUSY_RATIO
from dshealthd.collectors.maintenance import INFO
from dshealthd.core import state_writer
from dshealthd.core.collector import Sample
from dshealthd.findings import record
from dshealthd.findings.entry import Entry
from dshealthd.findings.past import DAY
from dshealthd.findings.record import NodeRecord
from dshealthd.findings.series import Series
from tests.findings.test_judge import Node, loaded

AGAIN = 3600.0
FILE = "history.json"
MAX_BYTES = 1 << 20
MAX_ENTRIES = 2_000

NOW = 1_800_000_000.0  # the 15th of January 2027, 8:00 UTC: far from midnight
YEAR = 365 * DAY


def fault(begin: float, seconds: float = 60.0, **other: Any) -> Entry:
    """Return a lost GPU."""
    given: dict[str, Any] = {
        "kind": "finding",
        "what": "GpuLost",
        "says": "A GPU is lost to the driver",
        "begin": begin,
        "end": begin + seconds,
        "part": "GPU 3",
        "reason": "Xid 79",
        "severity": "critical",
    }
    return Entry(**given | other)


def document(made: NodeRecord, wall: float = NOW, lasting: Iterable[Entry] = ()) -> dict[str, Any]:
    """Return the record as the API gives it."""
    found: dict[str, Any] = json.loads(made.document("n1", lasting, wall))
    return found


def figure(made: NodeRecord, wall: float = NOW, lasting: Iterable[Entry] = ()) -> float:
    """Return how often the node's hardware has failed in 30 days."""
    samples = {sample.metric: sample.value for sample in made.samples(lasting, wall)}
    return samples[record.INCIDENTS]


async def saved(made: NodeRecord, now: float = 0.0, wall: float = NOW) -> None:
    """Write the record, and wait until it is written."""
    made.save(now, wall, last=True)
    assert await state_writer.wait_until_written(60) == []


def kept(directory: Path, *entries: Entry) -> NodeRecord:
    """Return a record that was loaded from a file with these entries."""

    async def both() -> NodeRecord:
        first = NodeRecord(directory)
        await first.load()
        for entry in entries:
            first.add(entry)
        await saved(first)
        second = NodeRecord(directory)
        await second.load()
        return second

    return asyncio.run(both())


def after(directory: Path, content: str | bytes) -> NodeRecord:
    """Return a record that found a file with this content."""
    (directory / FILE).write_bytes(content.encode() if isinstance(content, str) else content)
    made = NodeRecord(directory)
    asyncio.run(made.load())
    return made


def says(made: NodeRecord, wall: float = NOW) -> list[str]:
    """Return what its entries say."""
    return [entry["says"] for entry in document(made, wall)["entries"]]


async def test_a_finding_that_ends_is_recorded_and_outlives_the_agent(tmp_path: Path) -> None:
    """What, part, reason, begin, end and the worst value; one that lasts is shown until now, and
    counted in `dshealthd_findings_total` once.
    """
    node = Node(tmp_path)
    await node.judge.apply(loaded("", tmp_path))
    for used in (0.95, 0.97, 0.95):
        node.over(used)
    lasting = json.loads(node.judge.history())
    node.over(0.1, 0)
    counts = [each.labels for each in node.judge.samples() if "_total" in each.metric.name]
    assert counts == [("HostLimitNear",)]
    await node.judge.close()
    again = Node(tmp_path)
    again.now = node.now + 3600
    await again.judge.apply(loaded("", tmp_path))
    after = json.loads(again.judge.history())
    await again.judge.close()
    assert [each["what"] for each in lasting["entries"] if each["end"] is None] == ["HostLimitNear"]
    (entry,) = [each for each in after["entries"] if each["kind"] == "finding"]
    assert entry | {"begin": 0, "end": 0} == {
        "kind": "finding",
        "what": "HostLimitNear",
        "says": "Open files, threads, ports or the like are close to their limit",
        "begin": 0,
        "end": 0,
        "part": "the system",
        "reason": "open files",
        "job": "",
        "severity": "warning",
        "value": 0.97,
        "times": 1,
    }
    assert entry["end"] - entry["begin"] == pytest.approx(130, abs=6)
    assert [each["kind"] for each in after["entries"]].count("boot") == 1


async def test_a_sign_that_does_not_last_is_not_recorded(tmp_path: Path) -> None:
    """What does not last for its hold, or is unreadable for a moment, is no finding of the past."""
    node = Node(tmp_path)
    await node.judge.apply(loaded("", tmp_path))
    node.over(0.95, 10)
    node.fail()
    node.judge.judge()
    node.over(0.1, 10)
    await node.judge.close()
    found = json.loads(node.judge.history())["entries"]
    assert {each["kind"] for each in found} == {"boot", "agent"}


def test_boots_starts_and_drivers_stand_in_the_same_line(tmp_path: Path) -> None:
    """A boot once, each start of the agent, a crash as one, a driver that changed; what comes back
    within the hour is one entry with its number.
    """
    made = NodeRecord(tmp_path)
    made.begin(NOW - 9000, ("a", 60.0), crashed=False)
    made.settle(_series(DRIVER(1, "550", "12.4", "12")), 0.0, NOW - 9000)
    made.settle(_series(), 10.0, NOW - 8990)  # the driver does not answer
    made.settle(_series(DRIVER(1, "570", "12.8", "12")), 20.0, NOW - 8980)
    for seconds in (300, 200, 100):
        made.begin(NOW - seconds, ("a", 60.0), crashed=True)
    made.begin(NOW - 1, ("b", 5.0), crashed=True)
    shown = [(each["kind"], each["times"]) for each in document(made)["entries"]]
    assert shown == [("boot", 1), ("agent", 1), ("driver", 1), ("agent", 4), ("boot", 1)]
    assert document(made)["since"] == NOW - 9060
    assert "GPU driver 550 became 570" in says(made)


def _series(*samples: Sample) -> Series:
    return Series(samples)


def test_what_comes_back_within_the_hour_is_one_entry() -> None:
    """A port that flaps is one, at its worst severity; after an hour it is another."""
    made = NodeRecord(None)
    made.add(fault(NOW - 9000, severity="warning", value=1.0))
    made.add(fault(NOW - 9000 + 60 + AGAIN, value=2.0, job="run-1"))
    made.add(fault(NOW - 9000, part="GPU 4"))
    made.add(fault(NOW - 9000 + 121 + 2 * AGAIN))
    shown = [(one["part"], one["times"]) for one in document(made)["entries"]]
    assert sorted(shown) == [("GPU 3", 1), ("GPU 3", 2), ("GPU 4", 1)]
    first = document(made)["entries"][0]
    assert (first["severity"], first["value"], first["job"]) == ("critical", 2.0, "run-1")


def test_incidents_are_a_day_apart_and_of_hardware() -> None:
    """What follows from one fault within a day is one incident; what a switch, heat or software may
    cause is none; what lasts counts, and what began 30 days ago does not.
    """
    made = NodeRecord(None)
    made.add(fault(NOW - 20 * DAY))
    made.add(fault(NOW - 20 * DAY + 7200, part="GPU 4"))
    made.add(fault(NOW - 19 * DAY + 1, what="HostErrors", reason="has had errors that ECC did not"))
    made.add(fault(NOW - 10 * DAY, what="HostErrors", reason="finds CPUs or processes stuck"))
    made.add(fault(NOW - 8 * DAY, what="FabricPortDown"))
    made.add(fault(NOW - 31 * DAY, part="GPU 5"))
    assert figure(made) == 1
    made.add(
        fault(NOW - 18 * DAY, what="HostErrors", reason="has had errors that ECC did not correct")
    )
    assert figure(made) == 2
    assert figure(made, lasting=[fault(NOW - 60)]) == 3
    assert figure(made, NOW + 11 * DAY) == 1


def test_what_begins_in_maintenance_does_not_count() -> None:
    """Whoever works at a node takes its GPUs away; what was before counts still."""
    made = NodeRecord(None)
    made.add(fault(NOW - 5 * DAY))
    made.add(fault(NOW - 3 * DAY))
    made.add(fault(NOW - 3.1 * DAY, 0.2 * DAY, kind="maintenance", what="Maintenance"))
    assert figure(made) == 1
    made.add(fault(NOW - 2 * DAY))
    assert figure(made, lasting=[fault(NOW - 3600, 7200, kind="maintenance")]) == 2


@pytest.mark.parametrize(
    ("reason", "count"), [("Repaired: GPU 3 replaced", 0), ("GPU 3 to be repaired", 1)]
)
def test_a_repair_begins_the_count_anew(reason: str, count: int) -> None:
    """The reason of a maintenance says that it was one, also where a drain began it; it is an entry
    once.
    """
    made = NodeRecord(None)
    made.add(fault(NOW - 5 * DAY))
    for second in range(0, 60, 10):
        samples = (INFO(1, "slurm", "gpu lost"), INFO(1, "operator", reason))
        made.settle(_series(*samples), float(second), NOW + second)
    assert figure(made, NOW + 60) == count
    assert [one["times"] for one in document(made, NOW + 60)["entries"]] == [1] * (2 - count)
    made.add(fault(NOW + 2 * DAY))
    assert figure(made, NOW + 3 * DAY) == count + 1


def test_days_have_their_worst_severity_and_those_not_watched_none(tmp_path: Path) -> None:
    """A fault of two days marks both, one that lasts today, too; a day on which no agent ran is
    unknown and not healthy.
    """
    made = kept(tmp_path, fault(NOW - 2 * DAY, DAY))
    for second in range(0, 120, 10):
        made.settle(_series(BUSY_RATIO(0.5, "0", "GPU-a")), float(second), NOW + second)
    days = document(made, lasting=[fault(NOW, severity="warning")])["days"]
    assert [day["worst"] for day in days] == [None] * 27 + ["critical", "critical", "warning"]
    assert days[-1]["watched_seconds"] == 110
    assert len(document(made)["days"]) == 30


def test_busy_seconds_are_those_of_the_mean_gpu() -> None:
    """Two GPUs of which one computes half of the time are a quarter; absent without a driver."""
    made = NodeRecord(None)
    assert [each.metric for each in made.samples((), NOW)] == [record.INCIDENTS]
    gpus = (
        BUSY_RATIO(0.5, "0", "GPU-a"),
        BUSY_RATIO(0.0, "1", "GPU-b"),
        DRIVER(1, "550", "12.4", "12"),
    )
    for second in range(0, 110, 10):
        made.settle(_series(*gpus), float(second), NOW + second)
    busy = {each.metric: each.value for each in made.samples((), NOW)}
    assert busy[record.BUSY] == pytest.approx(25)


def test_the_record_is_bounded(tmp_path: Path) -> None:
    """2,000 entries, a mebibyte, 90 days: the oldest go, first those about jobs, which may crash in
    a loop; the file is no larger, and is read.
    """
    made = kept(tmp_path, *(fault(NOW - DAY + 20 * at, 1, part=f"{at}") for at in range(2_100)))
    shown = document(made)["entries"]
    assert (len(shown), shown[0]["part"]) == (MAX_ENTRIES, "100")
    texts = dict.fromkeys(("reason", "job", "says"), "\U0001f525" * 200)
    made = kept(tmp_path, *(fault(NOW - DAY + at, 1, part=f"{at}", **texts) for at in range(900)))
    assert 100 < len(document(made)["entries"]) < 900
    assert MAX_BYTES * 0.9 < (tmp_path / FILE).stat().st_size < MAX_BYTES * 1.01
    jobs = (fault(NOW - DAY + at, 1, part=f"{at}", job=f"{at}") for at in range(2_100))
    made = NodeRecord(None)
    for entry in (fault(NOW - 2 * DAY), *jobs, fault(NOW, part="GPU 4")):
        made.add(entry)
    shown = [one["part"] for one in document(made)["entries"]]
    assert (len(shown), shown[:2], shown[-1]) == (MAX_ENTRIES, ["GPU 3", "102"], "GPU 4")
    made = kept(tmp_path / "..", fault(NOW - 89 * DAY), fault(NOW - 91 * DAY, part="GPU 4"))
    assert [one["part"] for one in document(made)["entries"]] == ["GPU 3"]


@pytest.mark.parametrize("content", [
    "",
    "{",
    "[]",
    "null",
    '{"version": 2}',
    b"\xff\xfe",
    "[" * 100_000,
    '{"' + "x" * 3 * MAX_BYTES,  # no more is read than twice what is written
])  # fmt: skip
def test_a_corrupt_file_is_set_aside(tmp_path: Path, content: str | bytes) -> None:
    """The record begins anew and says so; what was there is kept beside it."""
    made = after(tmp_path, content)
    assert "begins anew" in document(made)["problem"]
    assert (tmp_path / f"{FILE}.bad").exists()
    assert document(made)["entries"] == []
    made.add(fault(NOW))

    async def write() -> None:
        await saved(made)

    asyncio.run(write())
    assert json.loads((tmp_path / FILE).read_text("utf-8"))["entries"][0]["what"] == "GpuLost"


BAD_HOURS: list[Any] = [{}, [["x", 1]], [[5, "a"]], [[5, -1]], [[5, 1e9]], None]


@pytest.mark.parametrize("changes", [
    *({"hours": hours} for hours in BAD_HOURS),
    {"days": {}},
    {"days": [[1, [1e9, 0]]]},
    {"version": 2},
    {"begin": -1.0},
    {"end": None},
    {"times": 0},
    {"severity": "bad"},
    {"value": "1"},
    {"says": "x" * 201},
    {"kind": 1},
])  # fmt: skip
def test_a_file_that_no_release_writes(tmp_path: Path, changes: dict[str, Any]) -> None:
    """All of a file counts, or nothing, if it or an entry of it has another shape."""
    kept(tmp_path, fault(NOW))
    content = json.loads((tmp_path / FILE).read_text("utf-8"))
    assert after(tmp_path, json.dumps(content)).problem == ""
    (content if changes.keys() <= content.keys() else content["entries"][0]).update(changes)
    assert "begins anew" in after(tmp_path, json.dumps(content)).problem


def test_a_file_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    """It may be whole: a disk that does not answer at the start must not cost 90 days."""
    (tmp_path / FILE).mkdir()
    made = NodeRecord(tmp_path)
    asyncio.run(made.load())
    assert "is not kept" in document(made)["problem"]
    made.add(fault(NOW))
    made.save(0.0, NOW, last=True)
    assert (tmp_path / FILE).is_dir()
    assert len(document(made)["entries"]) == 1


def test_a_missing_file_is_a_new_record(tmp_path: Path) -> None:
    """Nothing is wrong with it."""
    made = NodeRecord(tmp_path)
    asyncio.run(made.load())
    assert (document(made)["problem"], document(made)["since"]) == ("", None)


def test_entries_of_the_future_wait_for_their_time(tmp_path: Path) -> None:
    """They are neither shown nor counted, and not lost: the clock of now may be the wrong one."""
    made = kept(tmp_path, fault(NOW - DAY), fault(NOW + YEAR))
    shown = document(made)
    assert (len(shown["entries"]), shown["in_the_future"], figure(made)) == (1, 1, 1)
    assert len(document(made, NOW + YEAR + DAY)["entries"]) == 1
    assert len(document(kept(tmp_path), NOW)["entries"]) == 1


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
async def test_a_clock_that_jumps_a_year_neither_loses_nor_invents(
    jump: float, tmp_path: Path
) -> None:
    """A finding over the jump has the length that it had; the jump itself is an entry; once the
    clock is right again, all is there as before.
    """
    node = Node(tmp_path)
    shift = 0.0
    node.judge._wall = lambda: node.now + 1e9 + shift
    await node.judge.apply(loaded("", tmp_path))
    node.over(0.95, 100)
    node.over(0.1, 0)
    node.now += 2 * AGAIN
    node.over(0.95, 100)
    shift = jump
    node.over(0.95, 100)
    node.over(0.1, 0)
    during = json.loads(node.judge.history())
    # The file is written by the wrong clock, and by an agent that runs for days with it.
    node.now += 2 * DAY
    node.over(0.1, 0)
    shift = 0.0
    node.over(0.1, 0)
    after = json.loads(node.judge.history())
    await node.judge.close()
    for shown in (during, after):
        found = [each for each in shown["entries"] if each["kind"] == "finding"]
        lengths = [each["end"] - each["begin"] for each in found]
        assert lengths == [pytest.approx(105, abs=6), pytest.approx(210, abs=6)]
        assert shown["in_the_future"] == 0
        assert [each["begin"] for each in found] == sorted(each["begin"] for each in found)
        (start,) = [each for each in shown["entries"] if each["kind"] == "agent"]
        assert found[0]["begin"] == pytest.approx(start["begin"], abs=60)
        assert shown["since"] == shown["entries"][0]["begin"]
    assert start["begin"] == pytest.approx(1e9 + 1000, abs=60)
    clocks = [each["value"] for each in after["entries"] if each["kind"] == "clock"]
    assert clocks[0] == pytest.approx(jump, abs=1)


@pytest.mark.parametrize(("hours", "count"), [(20, 1), (30, 0)])
async def test_ninety_days_go_only_by_a_clock_that_was_right_for_a_day(
    hours: int, count: int, tmp_path: Path
) -> None:
    """A clock a year ahead for an hour removes nothing from the file."""
    for entries in ([fault(NOW)], []):
        made = NodeRecord(tmp_path)
        await made.load()
        for entry in entries:
            made.add(entry)
        await saved(made)
    for hour in (0, 1, hours):
        made.settle(_series(), 3600.0 * hour, NOW + 3600 * hour + (YEAR if hour else 0))
        await saved(made, 3600.0 * hour, NOW + 3600 * hour + (YEAR if hour else 0))
    again = NodeRecord(tmp_path)
    await again.load()
    assert [one["kind"] for one in document(again)["entries"]].count("finding") == count


@pytest.mark.parametrize(("moved", "clocks"), [(-60.0, 0), (60.0, 0), (61.0, 1), (-61.0, 1)])
def test_a_clock_was_set_if_it_moved_by_more_than_a_minute(moved: float, clocks: int) -> None:
    """Time daemons slew it by less between two judgements."""
    made = NodeRecord(None)
    made.settle(_series(), 0.0, NOW)
    made.settle(_series(), 10.0, NOW + 10.0 + moved)
    kinds = [one["kind"] for one in document(made, NOW + 200.0)["entries"]]
    assert kinds.count("clock") == clocks


@pytest.mark.parametrize(("moved", "dated"), [(DAY, 0.0), (DAY + 1, DAY + 1)])
def test_only_a_clock_that_is_days_off_dates_anew(moved: float, dated: float) -> None:
    """A virtual machine that was paused for a night looks as if its clock had been set."""
    made = NodeRecord(None)
    made.add(fault(NOW, 1))
    made.settle(_series(), 0.0, NOW)
    made.settle(_series(), 10.0, NOW + 10.0 + moved)
    assert document(made, NOW + moved + 100.0)["entries"][0]["begin"] == NOW + dated


def test_no_day_is_longer_than_a_day() -> None:
    """By a clock that stands still, or is set back again and again: the file could not be read."""
    made = NodeRecord(None)
    for at in range(3000):
        made.settle(_series(BUSY_RATIO(1.0, "0", "GPU-a")), 30.0 * at, NOW)
    assert [*made._days.values()] == [(DAY, DAY)]
    assert [*made._hours.values()] == [3600.0]


def test_half_a_minute_between_two_judgements_counts_as_watched() -> None:
    """A node that was suspended was not watched meanwhile."""
    made = NodeRecord(None)
    for second in (0.0, 29.0, 129.0):
        made.settle(_series(), second, NOW + second)
    assert document(made, NOW + 200.0)["days"][-1]["watched_seconds"] == 59


async def test_how_long_it_was_watched_is_written_each_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens is written at once."""
    made = NodeRecord(tmp_path)
    await made.load()
    written: list[str] = []
    monkeypatch.setattr(made._file, "save", written.append)
    made.add(fault(NOW))
    for now, times in ((5000.0, 1), (8599.0, 1), (8600.0, 2)):
        made.save(now, NOW)
        assert len(written) == times


def lived_through(made: NodeRecord, *hours: float) -> None:
    """Judge once in each of these hours before NOW, as far as Unix time goes."""
    for at, hour in enumerate(hours):
        for second in (0.0, 10.0):
            made.settle(Series(()), 100.0 * at + second, NOW - 3600.0 * hour + second)


def test_the_last_hours_are_known_only_where_somebody_watched(tmp_path: Path) -> None:
    """An hour has its worst finding, one without an agent is blank, and a restart loses none."""
    made = NodeRecord(tmp_path)
    asyncio.run(made.load())
    lived_through(made, 30, 23, 5, 4, 3, 0)
    made.add(fault(NOW - 5 * 3600.0, seconds=3700, severity="warning"))
    lasting = fault(NOW - 600.0)
    lasting.end = None
    strip = made.hours([lasting], NOW)
    assert strip == "." + " " * 17 + "ww." + " CC"
    asyncio.run(saved(made))
    again = NodeRecord(tmp_path)
    asyncio.run(again.load())
    assert again.hours([], NOW) == "." + " " * 17 + "ww." + "  ."
    assert again.hours([], NOW + DAY) == " " * 24


def test_hours_and_a_clock_that_jumps_a_year() -> None:
    """No hour that a wrong clock made counts as watched once it is right again, and as many are
    kept as two days have.
    """
    made = NodeRecord(None)
    lived_through(made, 2, 1, -365 * 24, 0)
    assert made.hours([], NOW) == " " * 21 + "..."
    assert made.hours([fault(NOW + YEAR)], NOW) == " " * 21 + "..."
    lived_through(made, *range(2400))
    assert (len(made._days), len(made._hours)) == (90, 48)


def test_what_comes_back_for_another_reason_is_another_entry() -> None:
    """The kernel has killed a process while memory was short: neither hides the other."""
    made = NodeRecord(None)
    texts: dict[str, Any] = {"what": "HostMemoryPressure", "part": "", "severity": "warning"}
    short, killed = "all tasks wait for memory", "the kernel has killed processes"
    made.add(fault(NOW - 900, 600, reason=short, **texts))
    made.add(fault(NOW - 800, 500, reason=killed, **texts))
    made.add(fault(NOW - 200, reason=short, **texts))
    shown = [(one["reason"], one["times"]) for one in document(made)["entries"]]
    assert shown == [(short, 2), (killed, 1)]
