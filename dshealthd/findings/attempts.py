"""The attempts of this node's trainings: when each began and ended, how far it came, and why it
ended, with the account of where its time went.

Attempts of one training have one name: that which its user gives (`DSHEALTHD_RUN`), or else the
scheduler's job, the same after a requeue, or the first start of a torchrun, which gives each start
of its ranks another rendezvous. Those that have ended are kept in the node's record.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

from dshealthd.core import schema
from dshealthd.core.collector import Sample, gauge
from dshealthd.findings.entry import Entry
from dshealthd.findings.record import NodeRecord, current_boot
from dshealthd.jobs.environment import RENDEZVOUS, digest, natural, scheduler_job
from dshealthd.jobs.goodput import Card, Goodput, Slowest, quantiles
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.exits import FAILURES, ExitKind, first_end
from dshealthd.jobs.shares import share_places

if TYPE_CHECKING:
    from dshealthd.jobs.hangs.judge import Standstill
    from dshealthd.jobs.hangs.states import RankState
    from dshealthd.jobs.heartbeats.identity import Identity
    from dshealthd.jobs.heartbeats.sender import Sender
    from dshealthd.jobs.processes import TrainingProcess

Key = tuple[int, int]
"""Pid and start of a process."""
SPENT = gauge(
    "dshealthd_job_time_seconds",
    "Time that this node's ranks of a job have spent since they started, summed over ranks, by "
    "activity: work, wait (for other ranks), input, checkpoint, evaluation, compile, other "
    "(marked pauses), hung (or suspended), start, restart, repeated (steps that an earlier "
    "attempt had made) and unmeasured. Ranks with heartbeats only.",
    *("training_job", "spent"),
)
ATTEMPTS = gauge(
    "dshealthd_job_attempts",
    "Attempts of a job that this node has seen within 90 days, including the current one.",
    "training_job",
)
MAX_EXPORTED = 32
"""Most jobs with these series: users take turns."""
MAX_NAME = 100
"""Most characters of a run's name."""
MAX_LAUNCHERS = 64
"""Most torchruns whose first job is remembered; a node has one a job."""
GONE = 8.0
"""Seconds without any of its ranks after which an attempt is over: four checks. A rank that makes
another page is without one for up to 5 s."""
AWAY = 60.0
"""The same for those of an earlier agent: pages of its ranks are found within 5 s."""
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_Time = Annotated[float, schema.UNIX_TIME]
_Natural = Annotated[int, schema.Integer()]
_PAUSES = {HangClass.SUSPENDED, HangClass.DEBUGGER}
"""Standstills that are no hang, and no work either."""


@dataclass(slots=True)
class AttemptRank:
    """One rank's process of an attempt."""

    rank: int
    goodput: Goodput
    how: ExitKind | None = None
    at: float = 0.0
    """Unix time of its end."""


@dataclass(slots=True)
class Attempt:
    """One attempt on this node. Times are Unix time but `alive`, which is monotonic."""

    run: str
    job: str
    user: _Natural | None
    mark: _Natural
    """What its ranks on all nodes share, and no ranks of an attempt beside or before it."""
    world_size: int | None
    earlier: _Natural
    """Attempts before it that are known."""
    reached: _Natural
    """Steps that those have made."""
    begin: _Time
    last: _Time
    launcher: str = ""
    alive: float = schema.transient(default=0.0)
    again: bool = False
    """Whether it is not the first."""
    hang: tuple[str, str] | None = schema.transient(default=None)
    """Ranks that were waited for, and why it is hung, while it is."""
    members: dict[Key, AttemptRank] = field(default_factory=dict)


@dataclass(slots=True)
class Unended:
    """The attempts that have not ended, as they outlive the agent."""

    boot: str
    launchers: dict[str, tuple[str, _Time]]
    """By launcher that starts its ranks anew: the run's name, and when its last attempt ended."""
    open: list[Attempt]


def _restarts(process: TrainingProcess) -> list[int]:
    return [natural(process.environment.get(name)) or 0 for name in _RESTARTS]


class Attempts:
    """The attempts on this node that have not ended, and their way into its record."""

    def __init__(self, record: NodeRecord) -> None:
        """Begin with no attempt; `record` has those that have ended."""
        self._record = record
        self._open: list[Attempt] = []
        self._launchers: dict[str, tuple[str, float]] = {}
        """By launcher that starts its ranks anew: the run's name, and when its last attempt
        ended."""
        self._restored: Unended | None = None
        self.changed = False
        """Whether one has begun or ended since `document` was called."""

    def settle(
        self,
        senders: Mapping[tuple[str, int], Sequence[tuple[Identity, Sender]]],
        states: Mapping[str, Iterable[RankState]],
        standstills: Mapping[str, Standstill],
        now: float,
        wall: float,
    ) -> None:
        """Follow jobs' attempts as the ranks' states show them; `now` is monotonic, `wall` Unix."""
        # A process ends a moment before its connection.
        ended = {
            (rank.pid, rank.start) for ranks in states.values() for rank in ranks if rank.ended
        }
        connected = set()
        for found in senders.values():
            who, sender = found[-1]
            key = who.process.pid, who.process.start
            connected.add(key)
            if sender.message is not None and key not in ended:
                attempt = self._join(who.process, sender, now, wall)
                attempt.alive, attempt.last = now, wall
        for attempt in self._open:
            for rank in states.get(attempt.job, ()):
                member = attempt.members.get((rank.pid, rank.start))
                if member is not None and rank.ended is not None:
                    member.how, member.at = rank.ended, rank.ended_at or wall
            self._stand(attempt, standstills.get(attempt.job))
            # Its pages are read once more before they are dropped.
            over = all(m.how for m in attempt.members.values())
            if now - attempt.alive > GONE or (over and connected.isdisjoint(attempt.members)):
                self._end(attempt)
        self._open = [attempt for attempt in self._open if attempt.members]

    def _join(self, process: TrainingProcess, sender: Sender, now: float, wall: float) -> Attempt:
        """Return the attempt of a process: the latest with its mark, unless that has another
        process of its rank.
        """
        key, rank = (process.pid, process.start), process.launch.rank
        for attempt in self._open:
            if key in attempt.members:
                sender.goodput = attempt.members[key].goodput  # also of one that has reconnected
                return attempt
        launcher = "-".join(map(str, process.launcher or ()))
        name, ended = self._launchers.get(launcher, ("", 0.0))
        run = process.environment.get("DSHEALTHD_RUN", "")[:MAX_NAME]
        # torchrun's own restart has another rendezvous, and so another job if no scheduler has one.
        run = run or (not scheduler_job(process.environment) and name) or process.job
        mark = digest(
            *(process.job, *map(str, _restarts(process))),
            *(process.environment.get(name, "") for name in RENDEZVOUS),
        )
        for attempt in reversed(self._open):
            same = (attempt.mark, attempt.run, attempt.user) == (mark, run, process.user)
            if same and all(member.rank != rank for member in attempt.members.values()):
                break
        else:
            earlier = self._record.runs(run, process.user)
            attempt = Attempt(
                run,
                process.job,
                process.user,
                mark,
                process.launch.world_size,
                len(earlier),
                max((int(entry.value or 0) for entry in earlier), default=0),
                wall - (now - sender.goodput.at) - sum(sender.goodput.spent.values()),
                wall,
                launcher,
                again=bool(earlier) or any(_restarts(process)),
            )
            self._open.append(attempt)
            self.changed = True
            if launcher:
                self._launchers[launcher] = run, ended
                while len(self._launchers) > MAX_LAUNCHERS:
                    del self._launchers[next(iter(self._launchers))]
        attempt.members[key] = AttemptRank(rank, sender.goodput)
        sender.goodput.reached = attempt.reached
        if attempt.again and 0 < ended < attempt.begin:
            sender.goodput.lengthen(attempt.begin - ended)
        return attempt

    def _stand(self, attempt: Attempt, found: Standstill | None) -> None:
        """Count the time of a job that stands still, and remember why while it does."""
        living = [member for member in attempt.members.values() if member.how is None]
        if found is not None and (found.shown or found.reason in _PAUSES):
            for member in living:
                member.goodput.stall()
        if found is not None and found.shown:
            ranks = [str(rank) for rank, _ in found.culprits]
            part = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""
            attempt.hang = part, found.explanation
        elif attempt.hang and any(member.goodput.part != "hung" for member in living):
            attempt.hang = None

    def _end(self, attempt: Attempt, reason: str = "", says: str = "") -> None:
        """Put an attempt that is over into the record."""
        entry = self._entry(attempt, over=True)
        if reason:
            entry.reason, entry.says = reason, says
        ends = [member.at for member in attempt.members.values() if member.how]
        entry.end = max(ends) if len(ends) == len(attempt.members) else attempt.last
        entry.end = max(entry.end, entry.begin)
        if attempt.launcher in self._launchers:
            self._launchers[attempt.launcher] = attempt.run, entry.end
        self._record.add(entry)
        attempt.members = {}
        self.changed = True

    def lasting(self) -> list[Entry]:
        """Return the attempts of jobs that have not ended, as the record has others."""
        return [self._entry(attempt) for attempt in self._open]

    def _entry(self, attempt: Attempt, *, over: bool = False) -> Entry:
        reason, part, says = _why(attempt)
        if not (over or attempt.hang):
            reason, part, says = "", "", "runs"
        return Entry(
            kind="run",
            what=attempt.run,
            says=says,
            begin=max(0.0, round(attempt.begin, 3)),
            end=None,
            part=part,
            reason=reason,
            job=attempt.job,
            value=float(min(m.goodput.step for m in attempt.members.values())),
            card=_card(attempt),
        )

    def samples(self) -> Iterator[Sample]:
        """Yield where the time of the jobs that run was spent."""
        jobs = {attempt.job: attempt for attempt in self._open}
        for job, attempt in share_places(
            jobs.items(),
            MAX_EXPORTED,
            lambda entry: (entry[1].user, entry[0], entry[1].begin),
        ):
            for part, seconds in _part_seconds(attempt).items():
                yield SPENT(seconds, job, part)
            yield ATTEMPTS(attempt.earlier + 1.0, job)

    def document(self) -> dict[str, Any]:
        """Return the attempts of jobs for the agent's state."""
        self.changed = False
        told = Unended(current_boot()[0], self._launchers, self._open)
        return dict(schema.of(Unended).write(told, "runs"))

    def restore(self, document: Any) -> None:
        """Restore the attempts of jobs that `document` returned, once `resume` is called. Raise
        SchemaError if it is not that.
        """
        found: Unended = schema.of(Unended).read(document, "runs")
        if not all(attempt.members for attempt in found.open):
            schema.misfit("runs.open", "has an attempt without ranks")
        self._restored = found

    def resume(self, now: float) -> None:
        """Go on with the attempts of an earlier agent; those of before a boot have ended with it.

        The record must be loaded.
        """
        if (before := self._restored) is None:
            return
        self._restored = None
        if before.boot == current_boot()[0]:
            self._launchers |= before.launchers
            self._open += before.open
            for attempt in before.open:
                attempt.alive = now + AWAY - GONE
            return
        for attempt in before.open:
            self._end(attempt, "boot", "the node went down or was booted anew")


def _why(attempt: Attempt) -> tuple[str, str, str]:
    """Return why an attempt ended, or how it is: in a word, the rank that it is about, in words."""
    members = attempt.members.values()
    ends = [member for member in members if member.how is not None]
    if attempt.hang is not None:
        part, says = attempt.hang
        return "hung", part, f"hung: {says}"
    if (first := _failed(members)) is not None and first.how is not None:
        return str(first.how), f"rank {first.rank}", f"rank {first.rank} {FAILURES[first.how]}"
    if len(ends) < len(members):
        return "unknown", "", "its heartbeats ended"
    if all(member.how is ExitKind.ENDED for member in ends):
        return "ended", "", "ended by itself"
    if any(member.how is ExitKind.TERMINATED for member in ends):
        return "terminated", "", "stopped by a signal, as schedulers and launchers send"
    return "unknown", "", "ended, nobody saw how"


def _failed(members: Iterable[AttemptRank]) -> AttemptRank | None:
    """Return the rank whose failure ended an attempt; None if none failed before a signal asked one
    to end.
    """
    ends = [
        (member.at, member)
        for member in members
        if member.how in FAILURES or member.how is ExitKind.TERMINATED
    ]
    first = first_end(ends, attrgetter("how"))[1] if ends else None
    return first if first is not None and first.how in FAILURES else None


def _part_seconds(attempt: Attempt) -> dict[str, float]:
    """Return the seconds of each part of an attempt, summed over its ranks here."""
    whole: dict[str, float] = {}
    for member in attempt.members.values():
        for part, seconds in member.goodput.times(alone=attempt.world_size == 1).items():
            whole[part] = whole.get(part, 0.0) + seconds
    if attempt.again and "start" in whole:
        whole["restart"] = whole.pop("start")
    return whole


def _card(attempt: Attempt) -> Card:
    members = attempt.members.values()
    accounts = [member.goodput for member in members]
    return Card(
        attempt.mark,
        len(members),
        attempt.again,
        {part: round(seconds, 3) for part, seconds in _part_seconds(attempt).items()},
        attempt.user,
        attempt.world_size,
        first_step=min((one.began for one in accounts if one.began is not None), default=None),
        failed=None if (first := _failed(members)) is None else first.at,
        memory_peak_bytes=max((one.peak for one in accounts if one.peak), default=None),
        step_seconds=quantiles(accounts),
        slowest=_slowest(attempt),
    )


def _slowest(attempt: Attempt) -> Slowest | None:
    """Return the rank here with the most own work in a step, and what others have."""
    works = sorted(
        (*found, member.rank, member.goodput.role)
        for member in attempt.members.values()
        if (found := member.goodput.per_step) is not None
    )
    if not works:
        return None
    work, wait, rank, role = works[-1]
    usual = statistics.median_low(own for own, *_, of in works if of == role)
    return Slowest(rank, work, work + wait, usual, works[-2][0] if len(works) > 1 else 0.0)
