"""Which ranks' logs cover a hang from before to after it: only there does silence mean anything.

A rotated log begins late, a log copied while the job wrote it ends early, and some logs are
missing. A rank without a report in such a log may have reported like all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dshealthd.explain import clocks
from dshealthd.explain.events import Origin, listed
from dshealthd.explain.identities import Identities

if TYPE_CHECKING:
    from dshealthd.explain.facts import Recognized

GRACE = 10.0
"""Seconds after the last report by which every other watchdog has reported as well.

The ranks in genuine hangs report within 0.1 s of each other, and their heartbeat monitors within
5 s; each checks every second or less.
"""
ABORTED = -6
"""Exit code of a rank that ended itself with SIGABRT, as watchdogs do after their report."""
TERMINATED = -15
"""Exit code of a rank that its launcher ended with SIGTERM, which a stopped process never
handles."""
_WATCHDOG = "nccl-timeout/watchdog"
_REPORTS = (_WATCHDOG, "nccl-timeout/heartbeat")
_LAUNCHERS = tuple(
    f"child-failed/{name}" for name in ("exit-code", "deepspeed-launcher", "ended-by-launcher")
)
"""Messages of launchers when they end a job; by then its watchdogs have reported."""


class Coverage:
    """What the logs of a case cover for each rank."""

    def __init__(self, found: Recognized, near: float) -> None:
        """Examine all logs once ranks and times are known; `near` is for stamps without a year."""
        self._near = near
        self._sources = found.sources
        self._has_dumps = bool(found.ledger.dumped)
        self._reports = [event for event in found.events if event.pattern in _REPORTS]
        watchdogs = [event for event in self._reports if event.pattern == _WATCHDOG]
        self._is_announced = bool(watchdogs) and found.ledger.answers_signals
        """Whether each living rank reports the time-out of another one."""
        # Heartbeat monitors report long after the watchdogs, if at all.
        times = [event.time for event in watchdogs or self._reports if event.time is not None]
        self._reported = max(times, default=None)
        self._exits = {
            failure.rank: failure.exit for failure in found.failures if failure.rank is not None
        }
        self._reporters = {event.origin.source for event in self._reports}
        self._ended_jobs = {
            event.origin.source for event in found.events if event.pattern in _LAUNCHERS
        } | {failure.source for failure in found.failures}
        """Files in which a launcher reports how its job ended."""
        self._homes: dict[int, set[int]] = defaultdict(set)
        """The files with lines of each rank."""
        self._until: dict[int, float] = {}
        """Time of the last line of each file, in seconds by the clock of the case."""
        self._until_of: dict[int, float] = {}
        """Time of the last line of each rank."""
        identities = Identities(found)
        for source, facts in enumerate(found.sources):
            for origin in facts.origins:
                self._learn(source, origin, identities.rank(origin))
        self._is_shared = len(self._reporters) == 1 and (
            len({event.rank for event in self._reports}) > 1
            or (len(self._sources) == 1 and bool(self._ended_jobs))
        )
        """Whether all reports are in one file, which is then that of the whole job."""
        self._concatenated = self._find_concatenated()
        self._unended = found.ledger.unended(self._exits)
        """Files cut within a report, or between it and the end of its rank."""
        steps = (found.sources[source].last_step for source in self._reporters)
        self._reached = max((step for step in steps if step is not None), default=None)
        """The last step of any rank that reported."""

    def _learn(self, source: int, origin: Origin, rank: int | None) -> None:
        if rank is not None:
            self._homes[rank].add(source)
        stamp = self._sources[source].last_stamp.get(origin)
        if stamp is not None and (when := clocks.seconds(stamp, self._near)) is not None:
            self._until[source] = max(when, self._until.get(source, when))
            if rank is not None:
                self._until_of[rank] = max(when, self._until_of.get(rank, when))

    def gaps(self, ranks: Iterable[int]) -> list[str]:
        """Return why each of these ranks may have reported unseen; empty if none may have."""
        having: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            if gap := self.gap(rank):
                having[gap].append(rank)
        return [
            f"{listed(found)} {gap}" if len(found) == 1 else f"{listed(found)} have{gap[3:]}"
            for gap, found in having.items()
        ]

    def gap(self, rank: int) -> str:
        """Return why a silent rank may have reported unseen; empty if its silence is proven."""
        if not self._reports:  # exceptions end their process, and a launcher reports each
            return "has no dump here" if self._has_dumps else ""
        homes = self._logs_of(rank)
        if not homes:
            return "has no log here"
        if not self.begins_before(rank):
            return "has a log that begins after the hang"
        shared = homes & self._reporters
        ends_late = any(map(self._goes_on, shared)) if shared else self._is_still(rank, homes)
        if ends_late or self._is_late(self._until_of.get(rank)):
            return ""
        return "has a log that may end before the hang"

    @property
    def is_one_whole_log(self) -> bool:
        """Whether all reports are in one log of the whole job, and none can have been cut away."""
        return self._is_shared and all(
            self._sources[source].begins_before
            and source not in self._concatenated
            and self._goes_on(source)
            for source in self._reporters
        )

    @property
    def has_whole_summaries(self) -> bool:
        """Whether every launcher's summary of failed ranks has its beginning and its end."""
        return not any(facts.has_part_of_summary for facts in self._sources)

    def begins_before(self, rank: int) -> bool:
        """Return whether a log of a rank begins before the hang."""
        return any(self._sources[home].begins_before for home in self._logs_of(rank))

    def _logs_of(self, rank: int) -> set[int]:
        return self._homes.get(rank, set()) or (self._reporters if self._is_shared else set())

    def _goes_on(self, source: int) -> bool:
        """Return whether a file with reports continues until all its ranks have reported."""
        if source not in self._unended and not self._sources[source].is_cut:
            return True
        if source in self._concatenated:  # later lines in it need not be later in time
            return False
        return source in self._ended_jobs or self._is_late(self._until.get(source))

    def _is_late(self, when: float | None) -> bool:
        """Return whether a time is so late that no rank's first report comes after it."""
        return when is not None and self._reported is not None and when >= self._reported + GRACE

    def _find_concatenated(self) -> set[int]:
        """Return the files in which logs of several ranks are concatenated, judged by their
        times.
        """
        latest: dict[int, float] = {}
        found = set()
        times = [(event.origin.source, event.time) for event in self._reports]
        # A kernel's log that somebody has appended is older, and of no rank.
        forms = {"iso", "glog", *(event.stamp.form for event in self._reports if event.stamp)}
        for source in self._reporters:
            if (final := self._sources[source].final) is not None and final.form in forms:
                times += [
                    (source, self._until.get(source)),
                    (source, clocks.seconds(final, self._near)),
                ]
        for source, when in times:
            if when is not None:
                latest[source] = max(when, latest.get(source, when))
                if when < latest[source] - GRACE:
                    found.add(source)
        return found

    def _is_still(self, rank: int, homes: set[int]) -> bool:
        """Return whether a rank's own log ends where that of a stopped or dead process would.

        It has no line that is known to be after the hang, so everything else must show that the
        logs were taken after the job's end, and that this rank got as far as the others.
        """
        if self._unended or any(self._sources[home].is_cut for home in homes):
            return False
        code = self._exits.get(rank)
        if code == ABORTED:  # so it reported, and its log lacks that report
            return False
        if code == TERMINATED and self._is_announced:
            return False
        steps = [step for home in homes if (step := self._sources[home].last_step) is not None]
        return self._reached is not None and max(steps, default=-1) >= self._reached
