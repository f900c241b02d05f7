"""The node's record: what was wrong with it before, and what was done to it, over 90 days.

It takes up findings when they close, and boots, starts of the agent, changes of the driver and
steps of the clock. All are kept in the order in which they were recorded, whatever the clock said.
When a wrong clock is set right, what this agent has recorded by it is dated anew.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from dshealthd import __version__
from dshealthd.core import documents, schema
from dshealthd.core.collector import Sample, gauge
from dshealthd.core.documents import COMPACT
from dshealthd.core.host import read
from dshealthd.core.state_writer import StateFile
from dshealthd.findings.catalogue import catalogue
from dshealthd.findings.entry import MARKS, MAX_TEXT, RUN, Entry, Words
from dshealthd.findings.finding import ORDER, Moment, State
from dshealthd.findings.past import CLOCK_SET, DAY, HOUR

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.findings.series import Series

log = logging.getLogger(__name__)

INCIDENTS = gauge(
    "dshealthd_record_hardware_incidents",
    "Findings about this node's own hardware that began within the last 30 days, at least a day "
    "apart, outside maintenance, and since its last repair.",
)
BUSY = gauge(
    "dshealthd_record_gpu_busy_seconds",
    "Time for which the node's GPUs computed within the last 30 days, averaged over its GPUs. "
    "Absent without GPUs.",
)
SCHEMA = 1
"""Version of `/api/v1/history`; see docs/history.md."""
VERSION = 1
"""Version of the file; one of another begins anew."""
KEPT = 90 * DAY
"""Seconds for which the record goes back."""
WINDOW = 30
"""Days over which nodes are compared, and of the strip on the page: long enough for a third failure
of a node that has one in ten days, short enough that a repair counts within the month."""
HOURS = 24
"""Hours of the strip on the fleet's page."""
REPAIRED = "repaired"
"""How the reason of a maintenance begins that says that the node's hardware was repaired."""
MAX_ENTRIES = 2_000
"""Most entries: 22 a day for 90 days. Beyond, findings about jobs go first, so that jobs that crash
in a loop do not push out what was wrong with the node."""
MAX_BYTES = 1 << 20
"""Most bytes of all entries: 500 each, as they have."""
MAX_RUNS = 200
"""Most of them: two a day. Beyond, the user with most loses the oldest, so that jobs that crash in
a loop push out neither others' nor the findings."""
AGAIN = HOUR
"""Seconds within which what comes back is the same entry: a port that flaps is one, with the number
of times, and must not push out the rest of 90 days."""
SLACK = 30.0
"""Most seconds between two judgements that count as watched: three times the usual distance."""
SAVE_EVERY = HOUR
"""Seconds between two writes while nothing has happened: of how long the node was watched."""
_Seconds = Annotated[float, schema.Number(0, DAY)]


@dataclass(slots=True)
class RecordFile:
    """The record as its file has it."""

    version: int
    time: float
    began: Moment
    boot: str
    driver: Words
    days: dict[int, tuple[_Seconds, _Seconds]]
    hours: dict[int, _Seconds]
    entries: list[Entry]


def current_boot() -> tuple[str, float]:
    """Return the id of this boot, empty if it is not known, and the seconds since."""
    try:
        id = read("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        id = ""
    return id, time.clock_gettime(time.CLOCK_BOOTTIME)


class NodeRecord:
    """What has happened to this node."""

    def __init__(self, state: Path | None) -> None:
        """Begin with nothing; `state` is the directory of the file that outlives the agent."""
        self._entries: deque[Entry] = deque()
        """In the order in which they were recorded, each with its text: writing all of them anew
        takes 50 ms of the loop."""
        self._bytes = 0
        self._own = 0
        """How many of them, the last ones, this agent has recorded."""
        self._latest: dict[tuple[str, str, str, str], Entry] = {}
        self._days: dict[int, tuple[float, float]] = {}
        """By day of Unix time: seconds for which the node was judged, and its GPUs computed."""
        self._hours: dict[int, float] = {}
        """By hour of Unix time, of the last ones: seconds for which the node was judged."""
        self._began: float | None = None
        """Unix time of the first entry that was ever recorded."""
        self._boot = self._driver = self._repair = ""
        self._settled: tuple[float, float] | None = None
        """Monotonic and Unix time of the last judgement."""
        self._steady = 0.0
        """Monotonic time since which the clock has not been set."""
        self.problem = ""
        """Why the record begins anew, or is not kept."""
        self._file = StateFile(state, "history", 2 * MAX_BYTES)
        self._is_kept = False
        self._changed, self._saved = False, 0.0

    async def load(self) -> None:
        """Restore what an earlier agent of this node recorded."""
        try:
            if (document := await self._file.load()) is not None:
                self._restore(document)
        except schema.SchemaError as error:
            self._say(f"begins anew: {self._file.place}: {error}")
            try:
                await self._file.set_aside()
            except OSError as problem:
                log.warning("history: %s is not set aside: %s", self._file.place, problem)
        except OSError as error:
            # What cannot be read may be whole: it is not written over.
            self._say(f"is not kept, as what it was cannot be read: {self._file.place}: {error}")
            return
        self._is_kept = True

    def _say(self, problem: str) -> None:
        self.problem = f"the node's record {problem}"
        log.warning("history: %s", self.problem)

    def begin(self, wall: float, booted: tuple[str, float], *, crashed: bool) -> None:
        """Record the start of the agent, after a crash or not, and the boot before it.

        `booted` is as `boot` returns it.
        """
        id, seconds = booted
        if id and id != self._boot:
            at = max(0.0, wall - seconds)
            self.add(Entry("boot", "boot", "The node booted", at, at))
            self._boot = id
        what, how = ("crash", " after a crash") if crashed else (__version__, "")
        self.add(Entry("agent", what, f"Agent {__version__} started{how}", wall, wall))

    def settle(self, series: Series, now: float, wall: float) -> None:
        """Record set clocks, repairs, new drivers and the time that the node was watched, as of
        `series`; `now` is monotonic, `wall` Unix time.
        """
        if self._settled is None:
            self._steady = now
        before, before_wall = self._settled or (now, wall)
        self._settled = now, wall
        moved = (wall - now) - (before_wall - before)
        if abs(moved) > CLOCK_SET:
            self._steady = now
            ways = "ahead" if moved > 0 else "back"
            says = f"The clock was set {ways}, or the node was suspended"
            if abs(moved) > DAY:
                self._redate(moved)
            self.add(Entry("clock", ways, says, wall, wall, value=moved))
        elapsed = min(now - before, SLACK)
        watched, busy = self._days.get(int(wall // DAY), (0.0, 0.0))
        if used := [ratio for _, ratio in series("gpu_utilization_ratio")]:
            busy += elapsed * statistics.fmean(used)
        # At most: a clock that is set back lives a day twice.
        self._days[int(wall // DAY)] = min(DAY, watched + elapsed), min(DAY, busy)
        hour = int(wall // HOUR)
        self._hours[hour] = min(HOUR, self._hours.get(hour, 0.0) + elapsed)
        for kept, most in ((self._days, KEPT / DAY), (self._hours, 2 * HOURS)):
            while len(kept) > most:
                del kept[next(iter(kept))]
        reasons = (labels["reason"] for labels, _ in series("maintenance_info"))
        repair = next((why for why in reasons if why.lower().startswith(REPAIRED)), "")
        if repair and repair != self._repair:
            self.add(Entry("repair", repair, repair, wall, wall))
        self._repair = repair
        driver = series.first("gpu_driver_info").get("driver", "")
        if driver and driver != self._driver:
            if self._driver:
                says = f"GPU driver {self._driver} became {driver}"
                self.add(Entry("driver", driver[:MAX_TEXT], says[:MAX_TEXT], wall, wall))
            self._driver, self._changed = driver, True

    def _redate(self, moved: float) -> None:
        """Date what this agent has recorded by the clock of now.

        Only for days: an hour does no harm here, and a virtual machine that was paused for as long
        looks the same.
        """
        for entry in itertools.islice(reversed(self._entries), self._own):
            entry.begin = max(0.0, entry.begin + moved)
            entry.end = max(0.0, (entry.end or 0.0) + moved)
            self._write(entry)
        if self._own >= len(self._entries) and self._began is not None:
            self._began = max(0.0, self._began + moved)

    def _write(self, entry: Entry) -> None:
        before = len(entry.text)
        entry.text = documents.dumps(schema.of(Entry).write(entry), separators=COMPACT)
        self._bytes += len(entry.text) - before

    def add(self, entry: Entry) -> None:
        """Record an event, or a finding that has ended; one that comes back continues its entry."""
        last = self._latest.get(entry.key)
        if last is not None and _comes_back(last, entry):
            last.times += 1
            last.end = entry.end
            last.job = last.job or entry.job
            if _rank(entry) > _rank(last):
                last.severity, last.value = entry.severity, entry.value
            self._write(last)
        else:
            self._append(entry)
            self._own += 1
        self._began = entry.begin if self._began is None else self._began
        self._changed = True

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._latest[entry.key] = entry
        entry.text = ""
        self._write(entry)
        runs = [each for each in self._entries if each.card] if entry.card else []
        if len(runs) > MAX_RUNS:
            most = Counter(map(_user, runs)).most_common(1)[0][0]
            self._drop(next(each for each in runs if _user(each) == most))
        while len(self._entries) > MAX_ENTRIES or self._bytes > MAX_BYTES:
            about_jobs = (each for each in self._entries if each.job and each.part == each.job)
            self._drop(next(about_jobs, self._entries[0]))

    def runs(self, name: str, user: int | None) -> list[Entry]:
        """Return the attempts of a user's run that have ended here."""
        return [
            one
            for one in self._entries
            if one.card is not None and (one.what, _user(one)) == (name, user)
        ]

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self._bytes -= len(entry.text)
        if self._latest.get(entry.key) is entry:
            del self._latest[entry.key]

    def shown(self, wall: float) -> Iterator[Entry]:
        """Yield what lies within the time that the record goes back, by this clock."""
        for entry in self._entries:
            if (
                entry.end is not None
                and entry.end > wall - KEPT
                and entry.begin <= wall + CLOCK_SET
            ):
                yield entry

    def samples(self, open_now: Iterable[Entry], wall: float) -> Iterator[Sample]:
        """Yield the record's figures of the last 30 days; `open_now` has the findings that last."""
        known = [*self.shown(wall), *open_now]
        since = max(wall - WINDOW * DAY, *(e.begin for e in known if e.kind == "repair"), 0.0)
        works = [(e.begin, e.end or wall) for e in known if e.kind == "maintenance"]
        begins = sorted(
            entry.begin
            for entry in known
            if entry.begin > since
            and _of_hardware(entry)
            and not any(begin <= entry.begin <= end for begin, end in works)
        )
        count, last = 0, -DAY
        for begin in begins:
            if begin >= last + DAY:
                count, last = count + 1, begin
        yield INCIDENTS(float(count))
        today = int(wall // DAY)
        busy = sum(day[1] for at, day in self._days.items() if today - WINDOW < at <= today)
        if self._driver:
            yield BUSY(busy)

    def document(self, node: str, open_now: Iterable[Entry], wall: float) -> bytes:
        """Return the record as JSON for `/api/v1/history`, the oldest entry first."""
        watched = {day: seconds for day, (seconds, _) in self._days.items()}
        shown = sorted([*self.shown(wall), *open_now], key=lambda each: each.begin)
        document = {
            "schema": SCHEMA,
            "node": node,
            "time": round(wall, 3),
            "since": self._began if self._began is None else min(self._began, wall),
            "problem": self.problem,
            "in_the_future": sum(entry.begin > wall + CLOCK_SET for entry in self._entries),
            "days": [
                {
                    "day": time.strftime("%Y-%m-%d", time.gmtime(day * DAY)),
                    "worst": None if worst is None else str(worst),
                    "watched_seconds": round(watched.get(day, 0.0)),
                }
                for day, worst in _strip(shown, wall, DAY, WINDOW, watched)
            ],
            "entries": [entry for entry in shown if entry.kind != RUN],
            "runs": [entry for entry in shown if entry.kind == RUN],
        }
        return documents.dumps(document, separators=COMPACT, ensure_ascii=False).encode()

    def hours(self, open_now: Iterable[Entry], wall: float) -> str:
        """Return the worst of each of the last 24 hours, one character of MARKS each."""
        strip = _strip([*self.shown(wall), *open_now], wall, HOUR, HOURS, self._hours)
        return "".join(MARKS[worst] for _, worst in strip)

    def save(self, now: float, wall: float, *, last: bool = False) -> None:
        """Write the file if anything has happened, or an hour has passed."""
        if not self._is_kept or not (self._changed or last or now - self._saved >= SAVE_EVERY):
            return
        if now - self._steady >= DAY:  # by a clock that was right for a day
            while self._entries and (self._entries[0].end or wall) < wall - KEPT:
                self._drop(self._entries[0])
        self._changed, self._saved = False, now
        without = RecordFile(
            VERSION,
            wall,
            self._began,
            self._boot,
            self._driver,
            self._days,
            self._hours,
            [],
        )
        head = documents.dumps(schema.of(RecordFile).write(without), separators=COMPACT)
        entries = ",".join(entry.text for entry in self._entries)
        self._file.save(f"{head.removesuffix(']}')}{entries}]}}")

    def _restore(self, document: Any) -> None:
        found: RecordFile = schema.of(RecordFile).read(document, "it")
        if found.version != VERSION:
            schema.misfit("version", f"{found.version} is not {VERSION}")
        self._began, self._boot, self._driver = found.began, found.boot, found.driver
        self._days, self._hours = found.days, found.hours
        for entry in found.entries:
            if (entry.kind == RUN) is (entry.card is None) or entry.end is None:
                schema.misfit("entries", f"has a {entry.kind} without its end or card")
            self._append(entry)


def _strip(
    shown: Iterable[Entry], wall: float, unit: float, count: int, watched: Mapping[int, float]
) -> Iterator[tuple[int, State | None]]:
    """Yield each of the last hours or days, `unit` seconds long, with its worst severity; None
    without one of which it is not known that the node was `watched`, in seconds.
    """
    now = int(wall // unit)
    cells = range(now - count + 1, now + 1)
    ranks = {cell: 0 if watched.get(cell, 0.0) > 0 else -1 for cell in cells}
    for entry in shown:
        end = wall if entry.end is None else min(entry.end, wall)
        for cell in range(max(cells[0], int(entry.begin // unit)), int(end // unit) + 1):
            ranks[cell] = max(ranks.get(cell, -1), _rank(entry))
    for cell in cells:
        yield cell, None if ranks[cell] < 0 else ORDER[ranks[cell]]


def _rank(entry: Entry) -> int:
    return -1 if entry.severity is None else ORDER.index(entry.severity)


def _user(entry: Entry) -> int | None:
    return None if entry.card is None else entry.card.user


def _comes_back(last: Entry, entry: Entry) -> bool:
    """Return whether an entry is that of before, which has come back within the hour. What strikes
    another job then is told on its own.
    """
    soon = last.end is not None and last.begin <= entry.begin <= last.end + AGAIN
    return soon and last.card is None and (last.job == entry.job or not (last.job and entry.job))


def _of_hardware(entry: Entry) -> bool:
    known = catalogue().get(f"Dshealthd{entry.what}") if entry.kind == "finding" else None
    return known is not None and entry.reason.startswith(known.type.hardware)
