"""The case of one failure: rank, host and time of each event, and what followed from it."""

from __future__ import annotations

import signal
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dshealthd.explain import clocks
from dshealthd.explain.clocks import Clock
from dshealthd.explain.coverage import Coverage
from dshealthd.explain.events import Event, Origin, Stamp
from dshealthd.explain.facts import Failure, Recognized, SourceFacts
from dshealthd.explain.identities import Identities
from dshealthd.explain.names import bound, named, numbers, spoken_rank
from dshealthd.explain.patterns import load, said
from dshealthd.explain.remarks import is_row

NEAR = 50
"""Lines within which two messages may be about one fault."""
CLEARED_AFTER = 10
"""Lines of progress after an error that show it ended nothing; ranks print a few more."""
MISMATCH = "nccl-environment/mismatch"
"""Ranks that disagree: whoever reports it need not be the one that differs."""


@dataclass(slots=True)
class Case:
    """Everything in all logs, sorted by the part it may play."""

    found: Recognized
    identities: Identities
    causes: list[Event] = field(default_factory=list)
    consequences: list[Event] = field(default_factory=list)
    recovered: list[Event] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    world: int | None = None
    broken: dict[Origin, int] = field(default_factory=dict)
    """Where in each stream the communication first broke, by line order."""
    broken_at: dict[Clock, float] = field(default_factory=dict)
    """When the communication first broke, by clock."""
    timed_out: dict[int, int] = field(default_factory=dict)
    """Where in each file a collective first timed out, or a launcher first reported an exit."""

    near: float = 0.0
    """A moment to which stamps without a year are near."""
    explained: Event | None = None
    """The failure of a program that the cause, beneath it, explains."""
    _coverage: Coverage | None = None

    def when(self, stamp: Stamp) -> float | None:
        """Return the time of a stamp in seconds; None if it is not a date and time."""
        return clocks.seconds(stamp, self.near)

    @property
    def told(self) -> list[Event]:
        """All events, and what no pattern knows."""
        stated = (kept.event for facts in self.found.sources for kept in facts.statements)
        return [*self.found.events, *stated]

    @property
    def enough(self) -> int:
        """How many healthy lines after an error show that it ended nothing."""
        return max(CLEARED_AFTER, 3 * len(self.seen))

    @property
    def coverage(self) -> Coverage:
        """What the logs cover for each rank; worked out on first use."""
        if self._coverage is None:
            self._coverage = Coverage(self.found, self.near)
        return self._coverage

    def is_over(self, event: Event) -> bool:
        """Return whether the job went on, or ended well, after something failed.

        A warning ended nothing unless it is the last that its log says.
        """
        facts = self.found.sources[event.origin.source]
        is_passed = event.is_warning and event.layer == "program" and facts.calm > event.calm
        return is_passed or facts.progress - event.progress >= self.enough or self.ended_well(event)

    def is_done(self, facts: SourceFacts) -> bool:
        """Return whether a log's training has ended well, not only a stage of it: no more than a
        last evaluation follows.
        """
        after = facts.progress - facts.finished_progress
        return facts.finished > 0 and after < self.enough

    def ended_well(self, event: Event) -> bool:
        """Return whether the job ended well after a line.

        A kernel's log or a table that somebody has appended stands behind that end, but is older.
        """
        facts = self.found.sources[event.origin.source]
        if event.last_order < facts.finished:
            return True
        if is_row(event.place.quote) and (
            self.is_done(facts) or self.identities.is_strange(named(event.place.quote).get("pod"))
        ):
            return True
        if facts.finished_at is None or event.time is None or not event.exact:
            return False
        finished = self.when(facts.finished_at)
        return finished is not None and finished - event.time > clocks.UNCERTAINTY

    def is_foreign(self, event: Event) -> bool:
        """Return whether others than the job say it, where somebody put it."""
        return self.identities.above(event.origin.source, event.order).is_foreign


def prepare(found: Recognized, *, now: float) -> Case:
    """Work out the case without modifying `found`: a followed log is judged repeatedly."""
    found = replace(found, events=[replace(event) for event in found.events])
    case = Case(found, Identities(found), seen=set(found.ranks_seen), world=found.world)
    _place(case, now)
    _merge(case.found.events)
    _signals(case)
    _sort(case)
    _index(case)
    return case


def _place(case: Case, now: float) -> None:
    """Work out rank, host and time of every event."""
    found = case.found
    identities = case.identities
    case.near = clocks.moment((facts.dated for facts in found.sources), now)
    for event in case.told:
        fields = event.fields
        event.rank = identities.rank(event.origin)
        if event.rank is None and "local" in fields:
            event.rank = identities.rank(event.origin._replace(local=int(fields["local"])))
        if event.rank is None:
            event.rank = _of_watchdog(event.place.quote)
            identities.place(event.rank, identities.home(event.origin))
        if "rank" in fields and event.rank is None:
            event.rank = int(fields["rank"])
        if "rank_other" in fields and event.rank is not None:
            both = {int(fields["rank"]), int(fields["rank_other"])}
            # Ranks of a group, if the one that names them is neither.
            event.ranks = tuple(sorted(both)) if event.rank in both else ()
        tasks = numbers(fields.get("tasks", fields.get("task", "")))
        if event.rank is None and tasks and not identities.is_node(event.origin.source, tasks[0]):
            event.rank, event.ranks = tasks[0], tasks
        if event.rank is None and "pid" in fields:
            event.rank = identities.of_pid(int(fields["pid"]))
        above = identities.above(event.origin.source, event.order)
        before = identities.before(event.place.quote)
        identities.place(event.rank, before)
        if event.last is not None and identities.before(event.last.quote) != before:
            before, event.is_of_several = None, True
        event.host = (
            fields.get("host")
            or identities.home(event.origin)
            or before
            or bound(event.place.quote)
            or (identities.host(event.rank) if event.rank is not None else None)
            or above.host
        )
        if event.host and (node := identities.node(event.host)) != event.host:
            event.fields, event.host = {**fields, "pod": event.host}, node
        if event.rank is None and "pci" in fields:
            event.rank = identities.of_gpu(event.host, fields["pci"])
        if event.layer == "launcher":
            for rank in event.ranks or (event.rank,):
                identities.place(rank, event.host)
        if event.stamp is not None:
            event.time = case.when(event.stamp)
        if event.rank is not None:
            case.seen |= {event.rank, *event.ranks}
    _place_statements(case)


def _of_watchdog(quote: str) -> int | None:
    """Return the rank that a watchdog's line is from; None if it is of another group, or no such
    line.
    """
    said = spoken_rank(quote) if "(default_pg) " in quote else {}
    return int(said["rank"]) if said else None


def _place_statements(case: Case) -> None:
    """Work out whose is what several processes said: of hosts that say the same, it is none's."""
    identities = case.identities
    for kept in (kept for facts in case.found.sources for kept in facts.statements):
        by = {origin: identities.rank(origin) for origin in kept.origins}
        who = {rank for origin, rank in by.items() if rank is not None or origin.labeled}
        if len(who) > 1 and None not in by.values():
            kept.event.ranks = tuple(sorted(rank for rank in who if rank is not None))
        elif None in who:  # whose it is, besides, is unknown
            kept.event.rank = None
        if len({identities.home(origin) for origin in kept.origins} - {None}) > 1:
            kept.event.host, kept.event.is_of_several = None, True


def _merge(events: Sequence[Event]) -> None:
    """Join what several lines say about one fault: they share a file and a symptom, and agree.

    A kernel's OOM kill takes two lines, srun and slurmstepd each print one, and an assertion in a
    kernel has no rank, while the exception that follows from it has.
    """
    groups: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.role in {"cause", "confirmation"} and event.layer in {"hardware", "program"}:
            groups[event.origin.source, event.slug].append(event)
    for about in groups.values():
        first = about[0]
        for event in about[1:]:
            if event.order - first.last_order > NEAR or not _agree(first, event):
                first = event
                continue
            if first.role == "confirmation":  # it names the device of what follows
                event.fields = {**first.fields, **event.fields}
                event.says = said(event.texts, event.fields)
                first = event
                continue
            if event.pattern == first.pattern and event.fields != first.fields:
                first.fields = {**event.fields, **first.fields}
                first.says = said(first.texts, first.fields) + first.whence
            first.host = first.host or event.host
            first.last_order = event.last_order
            if first.rank is None and first.layer == event.layer:
                first.rank, first.ranks = event.rank, event.ranks


def are_near(one: Event, other: Event) -> bool:
    """Return whether two events are so near in one file that they may be about one fault."""
    is_same = one.origin.source == other.origin.source
    return is_same and abs(one.last_order - other.last_order) <= NEAR


def _agree(one: Event, other: Event) -> bool:
    """Return whether two events may be one: no value, rank or host that both have differs."""
    shared = one.fields.keys() & other.fields.keys()
    return (
        all(one.fields[name] == other.fields[name] for name in shared)
        and (one.rank is None or other.rank is None or one.rank == other.rank)
        and (one.host is None or other.host is None or one.host == other.host)
    )


def _signals(case: Case) -> None:
    """Turn launchers' reports of processes ended by a signal into events."""
    told: set[int | None] = set()
    causes = [event for event in case.found.events if event.role == "cause"]
    ranked = {event.rank for event in causes}
    lost = any(event.slug == "nccl-remote-error" for event in causes)
    for failure in case.found.failures:
        # The launcher saw this rank fail, it printed nothing, and the others lost it. If the others
        # had another error or a time-out, it would have had it too, in a log that is missing here.
        silent = (
            lost and None not in ranked and failure.rank not in ranked and (failure.exit or 0) > 0
        )
        if not failure.root:
            continue
        crash = _crash(failure, case)
        case.found.events.append(crash)
        if crash.is_crash or silent:
            told.add(failure.rank)
        else:
            crash.role, crash.layer = "consequence", "launcher"
    for facts in case.found.sources:
        for event in (kept.event for kept in facts.statements):
            if event.is_crash or "how" in event.fields:
                event.says = f"a process was ended by {_signal(event)}"
                event.title, event.steps = _of_crash(event)
    for event in list(case.found.events):
        if event.layer != "launcher" or not event.is_crash:
            continue
        if event.rank in told or (event.rank is None and told):
            continue
        event.title, event.steps = _of_crash(event)
        if event.role == "cause":
            if "exit" in event.fields:
                event.says += f", for {_signal(event)}"
            continue
        told.add(event.rank)
        event.role, event.layer = "cause", "program"
        event.says = f"a rank was ended by {_signal(event)}"


def _crash(failure: Failure, case: Case) -> Event:
    code = failure.exit or 0
    stamp = Stamp("iso", failure.time)
    event = Event(
        slug="child-failed", pattern="child-failed/signal", role="cause", layer="program",
        says=(f"rank {failure.rank} ended with exit code {code}; these logs have no error "
              "message from it"),
        place=failure.place,
        origin=Origin(failure.source, rank=failure.rank, host=failure.host), order=sys.maxsize,
        stamp=stamp, exact=True, fields={"exit": str(code)},
    )  # fmt: skip
    if event.signal:
        event.says = f"rank {failure.rank} was ended by {_signal(event)}"
    event.title, event.steps = _of_crash(event)
    event.rank, event.host, event.time = failure.rank, failure.host, case.when(stamp)
    return event


def _of_crash(event: Event) -> tuple[str, tuple[str, ...]]:
    """Return the title and first steps for an exit code: those of the pattern that says the
    same.
    """
    is_code = "exit" in event.fields and not event.signal
    name = (
        "exit-code" if is_code else "crash" if event.signal not in {0, signal.SIGKILL} else "killed"
    )
    pattern = load().by_id(f"child-failed/{name}")
    title = pattern.title if is_code or event.signal else "A signal ended a process"
    return title, pattern.step


def _signal(event: Event) -> str:
    if not event.signal:
        return f"a signal: {event.fields['how']}"
    return f"signal {event.signal} ({signal.Signals(event.signal).name})"


def _sort(case: Case) -> None:
    """Sort events into causes, consequences, and errors that the job recovered from."""
    found = case.found
    ends = _first_ends(case)
    for event in found.events:
        facts = found.sources[event.origin.source]
        if event.role == "loss":
            is_few = event.count < load().by_id(event.pattern).least
            is_over = is_few or event.last_order < facts.finite
            (case.recovered if is_over else case.causes).append(event)
        elif (
            event.role == "consequence"
            or (event.slug == "rendezvous-unreachable" and event.progress)
            or (event.layer == "scheduler" and event.is_effect and _follows_an_end(event, ends))
        ):
            case.consequences.append(event)
        elif event.role == "cause":
            if case.is_over(event) and event.pattern != "child-failed/signal":
                case.recovered.append(event)
                continue
            case.causes.append(event)


def _first_ends(case: Case) -> dict[tuple[int, int], dict[int, int]]:
    """Return where processes first ended, by signal, 0 for an exit code of their own: for each file
    and number of lines of progress before.
    """
    ends: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for event in case.told:
        if event.fields.get("exit", "0") != "0":
            first = ends[event.origin.source, event.progress]
            first[event.signal] = min(event.order, first.get(event.signal, event.order))
    return ends


def _follows_an_end(event: Event, ends: Mapping[tuple[int, int], Mapping[int, int]]) -> bool:
    """Return whether another part of the job ended before a signal came, and not of that signal:
    its launcher sent it, unless the job went on in between.
    """
    before = ends.get((event.origin.source, event.progress), {})
    return any(order < event.order for number, order in before.items() if number != event.signal)


def _index(case: Case) -> None:
    """Build the indexes that are used for each event: there may be thousands of events."""
    for event in case.causes:
        if event.is_timeout or "exit" in event.fields:
            source = event.origin.source
            case.timed_out[source] = min(event.order, case.timed_out.get(source, event.order))
        if event.layer != "communication" or event.weak:
            continue
        clock = clocks.clock_of(event.origin)
        case.broken[event.origin] = min(event.order, case.broken.get(event.origin, event.order))
        if event.exact and event.time is not None:
            case.broken_at[clock] = min(event.time, case.broken_at.get(clock, event.time))
