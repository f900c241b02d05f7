"""The silence of a rank: how long is usual, learnt from its heartbeats, and when it is overdue.

Heartbeats come as steps end, so that a pause between two steps (an evaluation every hundred steps,
a checkpoint, a batch that is late) is a silence like any other, and what is usual is the longest
silence of the last hours and not the time of a step. What is marked as a phase is learnt apart from
training. A bound is never infinite, and generous as long as little is known: before the first
steps, which compile and warm up, and in a phase that has not been seen to end yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dshealthd.training.message import Phase

FLOOR = 30.0
"""Seconds of silence in training that are usual for every job."""
MARGIN = 2.0
"""A silence in training may be so many times as long as the longest before it."""
LONGEST = 600.0
"""Seconds that a silence in training counts for at most, so that one hang which ended by itself
does not hide the next.
"""
UNKNOWN = 1800.0
"""Seconds that are granted where nothing is known yet.

As long as gloo waits for a collective by default, three times what NCCL does.
"""
FIRST_STEPS = 10
"""Steps that are not learnt from: they compile, warm up and allocate."""
MARKED_FLOOR, MARKED_MARGIN = 300.0, 4.0
"""The same as FLOOR and MARGIN in a marked phase, whose length varies more.

A checkpoint goes to storage that others use too.
"""
WINDOW = 6 * 3600.0
"""Seconds after which a silence may be forgotten; at the latest after twice as long."""


@dataclass(slots=True)
class _Longest:
    """The longest silence since one window ago, or up to two."""

    current: float | None = None
    before: float | None = None
    until: float = 0.0

    def add(self, seconds: float, at: float) -> None:
        """Note a silence that ended `at`."""
        # Two windows instead of all silences of six hours: two numbers for each phase, for the
        # price that one is forgotten up to a window late.
        if at >= self.until:
            self.before = self.current if at < self.until + WINDOW else None
            self.current, self.until = None, at + WINDOW
        self.current = seconds if self.current is None else max(self.current, seconds)

    @property
    def seconds(self) -> float | None:
        """The longest silence; None before the first."""
        known = [seconds for seconds in (self.current, self.before) if seconds is not None]
        return max(known, default=None)


class SilenceBaseline:
    """What is usual for one process.

    Times are seconds of any clock that does not run while nobody looks.
    """

    def __init__(self, at: float, step: int, phase: int, floor: float = FLOOR) -> None:
        """Begin with the first heartbeat that was heard, `at` that time.

        `floor` is what is usual in any training.
        """
        self._floor = floor
        self._first = step
        self._began = at
        self._step = step
        self._phase = phase
        self.heard = at
        """When the last heartbeat was heard."""
        self._longest: dict[int, _Longest] = {}

    def hear(self, at: float, step: int, phase: int) -> None:
        """Learn a rank's silence from a heartbeat heard `at`, not before the previous one."""
        silence, self.heard = at - self.heard, at
        if self._phase != Phase.TRAINING or self.knows_training:
            self._longest.setdefault(self._phase, _Longest()).add(silence, at)
        if step < self._step:  # it went back to a checkpoint: its first steps are slow again
            self._first, self._began = step, at
        self._step, self._phase = step, phase

    def document(self, now: float) -> dict[str, Any]:
        """Return the silences to keep over a restart, times as seconds before `now`."""
        return {
            "first": self._first,
            "began": now - self._began,
            "step": self._step,
            "phase": self._phase,
            "silence": now - self.heard,
            "longest": {
                str(phase): [longest.current, longest.before, now - longest.until]
                for phase, longest in self._longest.items()
            },
        }

    @classmethod
    def restored(cls, document: Any, at: float, floor: float = FLOOR) -> SilenceBaseline:
        """Return the kept baseline of silence, as if no time had passed until `at`.

        ValueError, TypeError or KeyError for what `document` never returned.
        """
        times = [document["began"], document["silence"]]
        longest = dict(document["longest"])
        known = [seconds for entry in longest.values() for seconds in entry if seconds is not None]
        if any(not math.isfinite(seconds) for seconds in (*times, *known)) or min(times) < 0:
            message = "times must be seconds"
            raise ValueError(message)
        self = cls(at - float(times[0]), int(document["first"]), int(document["phase"]), floor)
        self._step, self.heard = int(document["step"]), at - float(times[1])
        for phase, (current, before, until) in longest.items():
            self._longest[int(phase)] = _Longest(current, before, at - until)
        return self

    def resume(self, at: float, step: int, phase: int) -> None:
        """Go on with a heartbeat that came while nobody listened: how late it was is not known."""
        self.heard, self._step, self._phase = at, step, phase

    @property
    def knows_training(self) -> bool:
        """Whether the rank's steps are past those of which no silence is learnt."""
        return self._step - self._first >= FIRST_STEPS

    @property
    def bound(self) -> float:
        """Seconds of silence that are still usual for what it was last heard to be busy with."""
        longest = self._longest.get(self._phase)
        seconds = longest.seconds if longest is not None else None
        if self._phase != Phase.TRAINING:
            return (
                UNKNOWN
                if seconds is None
                else max(MARKED_FLOOR, MARKED_MARGIN * min(seconds, UNKNOWN))
            )
        if not self.knows_training:
            return max(UNKNOWN, self._floor)
        if seconds is None:  # steps are too fast for each to be heard: their mean has to do
            seconds = (self.heard - self._began) / (self._step - self._first)
        return max(self._floor, MARGIN * min(seconds, LONGEST))

    def silence(self, now: float) -> float:
        """Return the seconds since the last heartbeat."""
        return max(0.0, now - self.heard)

    def overdue(self, now: float) -> float:
        """Return the seconds by which the silence is longer than is usual; 0 while it is not."""
        return max(0.0, self.silence(now) - self.bound)
