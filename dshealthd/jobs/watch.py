"""Watches the ranks of this node: how long each has been silent, what its process does, and how it ended.

The time of silence runs only while the watch looks, so that an agent that was stopped, or a machine that was suspended, makes nobody late;
and it does not depend on the system's clock, which may be set.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.jobs.activity import State, activity
from dshealthd.jobs.ending import End
from dshealthd.jobs.hang import RankState
from dshealthd.jobs.heartbeat_identity import Identity
from dshealthd.jobs.pace import FLOOR, Pace
from dshealthd.training.message import Message, Phase, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.host import Host
    from dshealthd.jobs.ending import Endings

GRACE = 3
"""Looks for which a process that reports no longer is kept: its connection ends a little before it does."""
KEPT = 600.0
"""Seconds for which the end of a rank is told, unless its job goes on with another process before."""

Place = tuple[str, int]
"""Job and rank."""


@dataclass(slots=True)
class Watched:
    """One rank's process."""

    who: Identity
    message: Message
    pace: Pace
    cpu_heard: float | None = None
    """Seconds of its CPU time when it was last heard."""
    cpu: float | None = None
    state: State = State.UNKNOWN
    unheard: int = 0
    """Looks in a row in which it reported no longer."""
    end: End | None = None
    ended_at: float = 0.0
    """The watch's time at which its end was noticed."""

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time."""
        return self.who.process.pid, self.who.process.start

    def at(self, clock: float) -> RankState:
        """Return what is known of it at this time of the watch."""
        silence = self.pace.silence(clock)
        cpu = None
        # On a GPU who waits for the device takes a core as well, so that it tells nothing.
        if self.message.memory is None and self.cpu is not None and self.cpu_heard is not None and silence > 0.0:
            cpu = (self.cpu - self.cpu_heard) / silence
        pid, start = self.key
        return RankState(
            rank=self.who.process.launch.rank,
            pid=pid,
            start=start,
            step=self.message.step,
            phase=Phase(self.message.phase),
            stage=Stage(self.message.stage),
            silence=silence,
            bound=self.pace.bound,
            state=self.state,
            ended=self.end.how if self.end is not None else None,
            ended_at=self.end.at if self.end is not None else None,
            settled=self.pace.knows_training,
            cpu=cpu,
        )


class Watch:
    """All ranks of this node that report, and for a while those that did."""

    def __init__(self, host: Host, endings: Endings, *, slack: float, floor: float = FLOOR) -> None:
        """Watch none yet. `slack` is how many seconds may pass from one look to the next and still count; `floor` as for `Pace`."""
        self._host = host
        self._endings = endings
        self._slack = slack
        self._floor = floor
        self._now: float | None = None
        self._clock = 0.0
        self.watched: dict[Place, Watched] = {}

    def look(self, present: Mapping[Place, tuple[Identity, Message]], now: float) -> None:
        """Take in what the processes that report say now, at monotonic time `now` in seconds."""
        elapsed = 0.0 if self._now is None else min(now - self._now, self._slack)
        self._now = now
        self._clock += elapsed
        for place, (who, message) in present.items():
            heard = self._clock - min(max(now - message.sent, 0.0), elapsed)
            watched = self.watched.get(place)
            if watched is None or watched.who != who:
                self._begin(place, Watched(who, message, Pace(heard, message.step, message.phase, self._floor)))
            elif (watched.message.sent, watched.message.step) != (message.sent, message.step):
                watched.pace.hear(max(heard, watched.pace.heard), message.step, message.phase)
                watched.message, watched.cpu_heard = message, None
        for place, watched in list(self.watched.items()):
            watched.unheard = 0 if place in present else watched.unheard + 1
            self._examine(place, watched)

    def jobs(self) -> dict[str, list[RankState]]:
        """Return the ranks of each job."""
        found: dict[str, list[RankState]] = defaultdict(list)
        for (job, _), watched in sorted(self.watched.items()):
            found[job].append(watched.at(self._clock))
        return dict(found)

    def _begin(self, place: Place, watched: Watched) -> None:
        """Watch a process that is new: the job goes on, whatever ended before."""
        job = place[0]
        for other, before in list(self.watched.items()):
            if other == place or (other[0] == job and before.end is not None):
                self._forget(other)
        self.watched[place] = watched
        self._endings.follow(*watched.key)

    def _examine(self, place: Place, watched: Watched) -> None:
        """Look at the process itself."""
        if watched.end is not None:
            if self._clock - watched.ended_at > KEPT:
                self._forget(place)
            return
        watched.end = self._endings.end(*watched.key)
        if watched.end is not None:
            watched.state, watched.ended_at = State.GONE, self._clock
            return
        if watched.unheard > GRACE:  # it lives, and has let go of its heartbeat
            self._forget(place)
            return
        try:
            found = activity(self._host, *watched.key)
        except (OSError, ValueError):
            found = None
        watched.state = found.state if found is not None else State.UNKNOWN
        watched.cpu = found.cpu_seconds if found is not None else None
        if watched.cpu_heard is None:
            watched.cpu_heard = watched.cpu

    def _forget(self, place: Place) -> None:
        self._endings.forget(*self.watched.pop(place).key)
