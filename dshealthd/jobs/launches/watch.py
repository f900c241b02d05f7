"""The ranks whose launches are counted: who they are, since when, and why others are not."""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.core.host import read_bytes
from dshealthd.jobs.launches.library import MappedNccl
from dshealthd.jobs.launches.obstacle import Obstacle, Refused, refused_by_kernel
from dshealthd.jobs.launches.programs import MAX_PROCESSES, RING, Counts, Init
from dshealthd.jobs.processes import UNINTERRUPTIBLE, Key, ProcessTable, TrainingProcess, read_stat
from dshealthd.jobs.ranks import Ranks
from dshealthd.jobs.shares import share_places
from dshealthd.linux.process import read_memory

if TYPE_CHECKING:
    from dshealthd.core.collector import Context
    from dshealthd.jobs.launches.breakpoints import Breakpoints

BUDGET = 5000.0
"""Hits a second of one process, averaged from one turn to the next: at 1.1 µs each, 0.55 % of a
core. A training launches some hundreds.
"""
REST = 600.0
"""Seconds for which a process beyond its budget is left alone."""
EARLY, LATER = 120.0, 30.0
"""Seconds: a rank loads NCCL within minutes of its start; in an older one it is looked for less
often."""
LOOKS = 4 * MAX_PROCESSES
"""Most processes that are searched for NCCL in one turn, about 0.2 s; users take turns."""
COMPARED = RING // 4
"""Fewest launches that ranks must have in common for their times to be compared."""


@dataclass
class Followed:
    """A rank's process whose launches are to be counted."""

    process: TrainingProcess
    run: str
    attached: bool = False
    refusal: Refused = field(default_factory=lambda: Refused(Obstacle.NO_LIBRARY))
    """Why it is not counted, while it is not attached."""
    due: float = 0.0
    """Monotonic time before which it is not tried again."""
    hits: int = 0
    names: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """Names of communicators whose initialization was seen, by address and `Counts.first`: an
    address is used again. With the rank in that of which the unique id is known."""


class Launches:
    """Counts the launches of the ranks of this node's recognized jobs."""

    def __init__(self, context: Context, breakpoints: Breakpoints) -> None:
        """Start without ranks."""
        self._context = context
        self._breakpoints = breakpoints
        self._table = context.shared(ProcessTable)
        self._ranks = Ranks()
        self._libraries = MappedNccl(context.host)
        self._followed: dict[Key, Followed] = {}
        self._at: float | None = None
        self._looks = 0

    def turn(self) -> list[dict[str, Any]]:
        """Attach to new ranks, leave those that may not be counted, and return what is known of
        each, for `report`. OSError if `/proc` or the maps cannot be read.
        """
        self._context.sweep += 1
        now = self._context.monotonic()
        wanted = self._wanted(self._table.refresh())
        for key in self._followed.keys() - {process.key for _, process in wanted}:
            self._leave(self._followed.pop(key))
        places = MAX_PROCESSES
        for run, process in wanted:
            one = self._followed.setdefault(process.key, Followed(process, run))
            one.process = process
            if places:
                self._check(one, now)
                places -= one.attached
            else:
                self._leave(one, Refused(Obstacle.TOO_MANY_RANKS))
        self._at = now
        counts = self._breakpoints.maps.read()
        self._name(counts)
        return [self._document(one, counts) for one in self._followed.values()]

    def close(self) -> None:
        """Stop counting launches of all ranks, and remove all breakpoints."""
        self._breakpoints.close()

    def _wanted(self, processes: Sequence[TrainingProcess]) -> list[tuple[str, TrainingProcess]]:
        """Return the runs and processes to follow, in the order in which they get places: of each
        rank the first that has NCCL, if one has. A script that starts the training has none, and a
        data loader has its parent's.
        """
        children: defaultdict[int, list[TrainingProcess]] = defaultdict(list)
        for process in processes:
            children[process.parent].append(process)
        runs = self._ranks.runs(processes, self._table.machine)
        tops = [(run.name, process) for run in runs for process in run.processes]
        ordered = share_places(
            tops, len(tops), lambda entry: (entry[1].user, entry[1].job, entry[1].start)
        )
        self._looks = LOOKS
        return [(name, self._own(top, children)) for name, top in ordered]

    def _own(
        self, top: TrainingProcess, children: Mapping[int, list[TrainingProcess]]
    ) -> TrainingProcess:
        """Return the process of a rank to follow, given the one that its launcher started."""
        line, known = [top], {top.pid}
        for each in line:
            for child in children.get(each.pid, ())[:LOOKS]:
                same = (child.job, child.launch.rank) == (top.job, top.launch.rank)
                if same and child.pid not in known:  # a pid that is used again makes a circle
                    known.add(child.pid)
                    line.append(child)
        for each in line:
            one = self._followed.get(each.key)
            if one is not None and one.attached:
                return each
        return next(filter(self._has_nccl, line), top)

    def _has_nccl(self, process: TrainingProcess) -> bool:
        one = self._followed.get(process.key)
        if one is not None and self._context.monotonic() < one.due:
            return one.refusal.reason is not Obstacle.NO_LIBRARY
        if self._looks <= 0:
            return False
        self._looks -= 1
        try:
            # What a process in uninterruptible sleep has mapped may not be readable until it wakes.
            if read_stat(self._context.host, process.pid).state == UNINTERRUPTIBLE:
                return False
            with self._libraries.opened(process.pid):
                return True
        except Refused as refusal:
            return refusal.reason is not Obstacle.NO_LIBRARY
        except (OSError, ValueError, ArithmeticError):
            return False

    def _check(self, one: Followed, now: float) -> None:
        """Attach to a process, or leave it, as its state demands."""
        pid, start = one.process.key
        try:
            stat = read_stat(self._context.host, pid)
            status = read_bytes(self._context.host.proc(f"{pid}/status"))
        except (OSError, ValueError, ArithmeticError):
            return  # it has ended: the next turn leaves it
        if _tracer(status):
            self._leave(one, Refused(Obstacle.DEBUGGER))
        elif one.attached:
            hits = self._breakpoints.maps.hits(pid).hits
            elapsed = now - (self._at if self._at is not None else now)
            if elapsed > 0 and (rate := (hits - one.hits) / elapsed) > BUDGET:
                self._leave(one, Refused(Obstacle.OVER_BUDGET, f"{rate:.0f} launches a second"))
                one.due = now + REST
            one.hits = hits
        elif now >= one.due and stat.start == start and stat.state != UNINTERRUPTIBLE:
            self._try(one, now)

    def _try(self, one: Followed, now: float) -> None:
        pid, start = one.process.key
        young = now - one.process.started < EARLY
        one.due = now + (0.0 if young else LATER)
        try:
            with self._libraries.opened(pid) as library:
                self._breakpoints.maps.admit(pid)
                self._breakpoints.attach(pid, library.descriptor, library.offsets)
            stat = read_stat(self._context.host, pid)
            one.attached, one.hits = stat.start == start, 0
            one.names.clear()
            if not one.attached:
                self._leave(one)
        except Refused as refusal:
            self._leave(one, refusal)
            if refusal.reason is not Obstacle.NO_LIBRARY:
                one.due = now + LATER
        except OSError as error:
            self._leave(one, refused_by_kernel(self._context.host, error, "attach"))
        except (ValueError, ArithmeticError) as error:
            self._leave(one, Refused(Obstacle.UNREADABLE, str(error)))

    def _leave(self, one: Followed, refusal: Refused | None = None) -> None:
        """Remove the breakpoints of a process, with all that was counted of it."""
        self._breakpoints.detach(one.process.pid)
        if one.attached:
            self._breakpoints.maps.forget(one.process.pid)
        one.attached = False
        one.refusal = refusal or one.refusal

    def _name(self, counts: Mapping[tuple[int, int], Counts]) -> None:
        """Name the communicators of which the initialization was seen: the place that NCCL was
        given now has the communicator's address, and it was used later.
        """
        attached = {one.process.pid: one for one in self._followed.values() if one.attached}
        for one in attached.values():
            current = {(at, of.first) for (pid, at), of in counts.items() if pid == one.process.pid}
            one.names = {known: name for known, name in one.names.items() if known in current}
        made: dict[tuple[int, tuple[int, int]], Init] = {}
        for pid, init in sorted(self._breakpoints.maps.initialized(), key=lambda each: each[1].at):
            known = self._made(pid, init, counts) if pid in attached else None
            if known is not None:  # of two places with one address, the older is of one that ended
                made.pop((pid, known), None)
                made[pid, known] = init
        for (pid, known), init in made.items():  # what is split comes before its parts
            names = attached[pid].names
            if known not in names and (name := _origin(init, names)) is not None:
                names[known] = name

    def _made(
        self, pid: int, init: Init, counts: Mapping[tuple[int, int], Counts]
    ) -> tuple[int, int] | None:
        """Return address and first use of the communicator that an initialization has made."""
        try:
            place = self._context.host.proc(str(pid))
            (address,) = struct.unpack("=Q", read_memory(place, init.slot, 8))
        except (OSError, ValueError, ArithmeticError, struct.error):
            return None  # the place is gone: the communicator stays without a name
        found = counts.get((pid, address))
        return (address, found.first) if found is not None and found.first > init.at else None

    def _document(self, one: Followed, counts: Mapping[tuple[int, int], Counts]) -> dict[str, Any]:
        process = one.process
        document: dict[str, Any] = {
            "job": process.job,
            "run": one.run,
            "rank": process.launch.rank,
            "pid": process.pid,
            "refused": None,
            "detail": "",
            "communicators": [],
        }
        if not one.attached:
            document |= {"refused": one.refusal.reason, "detail": one.refusal.detail}
            return document
        if self._breakpoints.maps.hits(process.pid).refused:
            document["refused"] = Obstacle.TOO_MANY_COMMUNICATORS
        for (pid, address), found in counts.items():
            if pid == process.pid:
                name, rank = one.names.get((address, found.first), ("", 0))
                document["communicators"].append(
                    {
                        "name": name,
                        "rank": rank,
                        "collectives": found.collectives,
                        "sends": found.sends,
                        "last": found.last / 1e9 if found.last else None,
                        "times": {number: at / 1e9 for number, at in found.times.items()},
                    }
                )
        return document


def _origin(init: Init, names: Mapping[tuple[int, int], tuple[str, int]]) -> tuple[str, int] | None:
    """Return name and rank of a communicator, given the names of others of the same process; None
    if it was split from one without.
    """
    if isinstance(init.origin, bytes):
        return hashlib.sha256(init.origin).hexdigest()[:12], init.rank
    if init.origin.parent not in names:
        return None
    name, rank = names[init.origin.parent]
    text = f"{name}-{init.origin.number}-{init.origin.color}"
    return hashlib.sha256(text.encode()).hexdigest()[:12], rank


def compare(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Add to the communicators of `ranks`, as `Launches.turn` returns them, by how many collectives
    they are `behind` the furthest rank of this node, and how many seconds `late` they launch.

    Only where all of them were counted from the communicator's first collective on: its name is
    known. `late` is the median time after the first of the ranks, None if too few launches are
    comparable. The times themselves are removed.
    """
    groups: defaultdict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for rank in ranks:
        whole = rank["refused"] is None
        for one in rank["communicators"]:
            one |= {"behind": None, "late": None}
            if one["name"] and whole:
                groups[rank["job"], rank["run"], one["name"]].append(one)
    for group in groups.values():
        if len(group) > 1 and len({one["rank"] for one in group}) == len(group):
            furthest = max(one["collectives"] for one in group)
            common = set.intersection(*(set(one["times"]) for one in group))
            first = {number: min(one["times"][number] for one in group) for number in common}
            for one in group:
                one["behind"] = furthest - one["collectives"]
                if len(common) >= COMPARED:
                    later = [one["times"][number] - first[number] for number in common]
                    one["late"] = statistics.median(later)
    for rank in ranks:
        for one in rank["communicators"]:
            del one["times"]


def _tracer(status: bytes) -> bool:
    """Return whether a debugger is attached, from `/proc/<pid>/status`; also if it does not say."""
    return status.partition(b"\nTracerPid:")[2].split(None, 1)[:1] != [b"0"]
