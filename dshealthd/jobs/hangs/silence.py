"""The silence of a rank: how long is usual, learnt from its heartbeats, and when it is overdue.

Heartbeats come when steps end, so a pause between two steps (an evaluation every hundred steps, a
checkpoint, a late batch) is a silence like any other. Usual is therefore the longest silence of the
last hours, not the time of a step. A silence that was recognized as a pause is not learnt, and one
beyond the bound only once the like has come twice, so that neither hides a hang for hours. Marked
phases are learnt separately from training. A bound is always finite. It is longer while little is
known: in the first steps, which compile and warm up, and in a phase that has not ended before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dshealthd.core import schema
from dshealthd.training.message import Phase

FLOOR = 30.0
"""Seconds of silence in training that are usual for every job."""
MARGIN = 2.0
"""Factor on the longest silence so far that gives the bound in training."""
LONGEST = 600.0
"""Most seconds that a silence in training counts for, so that a hang that ended by itself does not
hide the next one.
"""
FIRST = 100.0
"""Seconds of silence that are usual in the first steps, and in phases of `SHOWN` while nobody
works. A hang there is to be paged within 150 s, of which the rule and a scrape take 30; what else
takes longer is known by its CPU time, or by the bytes that it moves.
"""
UNKNOWN = 1800.0
"""Bound in seconds of a marked phase that has not ended before.

It is gloo's default timeout of a collective, and three times NCCL's.
"""
FIRST_STEPS = 10
"""Steps that are not learnt from: they compile, warm up and allocate."""
MARKED_FLOOR, MARKED_MARGIN = 300.0, 4.0
"""FLOOR and MARGIN of marked phases, whose length varies more.

A checkpoint goes to storage that others use too.
"""
SHOWN = frozenset({Phase.CHECKPOINT, Phase.COMPILE})
"""Marked phases whose work shows on the node: bytes, waits for storage, CPU time. An evaluation may
be that of a service elsewhere.
"""
HALVED = 12 * 3600.0
"""Seconds after which a silence counts for half as much: what comes every twelve hours is just
usual."""


@dataclass(slots=True)
class SilenceBaseline:
    """The usual silences of one process.

    Times are seconds of any clock that only runs while the process is watched.
    """

    first: int
    """Its step at the first heartbeat, or at the last that resumed from a checkpoint."""
    began: float
    step: int
    phase: int
    heard: float
    """Time of the last heartbeat."""
    overdue: float = 0.0
    """The last silence in training that was overdue."""
    longest: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The longest silence of each phase, and when it ended."""
    floor: float = schema.transient(default=FLOOR)
    """The silence that is usual in any job."""

    @classmethod
    def begin(cls, at: float, step: int, phase: int, floor: float = FLOOR) -> SilenceBaseline:
        """Begin with the first heartbeat, heard `at` that time."""
        return cls(step, at, step, int(phase), at, floor=floor)

    def moved(self, seconds: float, floor: float) -> SilenceBaseline:
        """Return the baseline by a clock that is so many seconds ahead, with another floor."""
        longest = {phase: (lasted, at + seconds) for phase, (lasted, at) in self.longest.items()}
        began, heard = self.began + seconds, self.heard + seconds
        return replace(self, began=began, heard=heard, longest=longest, floor=floor)

    def record(self, at: float, step: int, phase: int, *, learn: bool = True) -> None:
        """Learn a silence from a heartbeat heard `at`, not earlier than the previous one.

        `learn` is false for a silence that is not to become usual.
        """
        usual = silence = at - self.heard
        if learn and self.phase == Phase.TRAINING and silence > self.bound:
            # One may have been a hang, such as a network's failure of a minute; a pause comes
            # again.
            usual, self.overdue = min(silence, self.overdue), silence
        self.heard = at
        known = self.phase != Phase.TRAINING or self.knows_training
        if learn and known and usual > (self._usual(self.phase) or 0.0):
            self.longest[self.phase] = usual, at
        if step < self.step:  # it resumed from a checkpoint: its first steps are slow again
            self.first, self.began = step, at
        self.step, self.phase = step, int(phase)

    def resume(self, at: float, step: int, phase: int) -> None:
        """Continue `at` that time as if with a heartbeat, after a silence that says nothing: no
        agent ran, or the process was stopped.
        """
        self.heard, self.step, self.phase = at, step, int(phase)

    @property
    def knows_training(self) -> bool:
        """Whether the rank is past its first steps, from which nothing is learnt."""
        return self.step - self.first >= FIRST_STEPS

    @property
    def bound(self) -> float:
        """Seconds of silence that are still usual in its last known phase."""
        seconds = self._usual(self.phase)
        if self.phase != Phase.TRAINING:
            if seconds is None:
                return UNKNOWN
            return max(MARKED_FLOOR, MARKED_MARGIN * min(seconds, UNKNOWN))
        if not self.knows_training:
            return max(FIRST, self.floor)
        if seconds is None:  # steps are too fast for each to be seen: their mean has to do
            seconds = (self.heard - self.began) / (self.step - self.first)
        return max(self.floor, MARGIN * min(seconds, LONGEST))

    @property
    def idle_bound(self) -> float:
        """Seconds of silence that are still usual while none of its job is at work on this node."""
        if self.phase not in SHOWN:
            return self.bound
        seconds = self._usual(self.phase) or 0.0
        return max(FIRST, self.floor, MARKED_MARGIN * min(seconds, UNKNOWN))

    def _usual(self, phase: int) -> float | None:
        """Return the longest silence of a phase as it counts at the last heartbeat; None before
        one.
        """
        if phase not in self.longest:
            return None
        seconds, at = self.longest[phase]
        return float(seconds * 0.5 ** (max(0.0, self.heard - at) / HALVED))

    def silence(self, now: float) -> float:
        """Return the seconds since the rank's last heartbeat."""
        return max(0.0, now - self.heard)
