"""The progress of a job, from one answer of its RAS to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.jobs.ras.status import Communicator, Status


@dataclass(slots=True)
class JobProgress:
    """What is remembered of a job.

    Only ranks of communicators that are in both answers are compared: one that appears or falls
    silent is no progress. A count that is lower than before is another communicator's of the same
    name, and is a change as good as any.
    """

    answered: float | None = None
    """Unix time of the last answer."""
    last: float | None = None
    """Unix time of the last answer in which a count had changed.

    None as long as none has been seen to.
    """
    idle: int | None = None
    """Answers in a row without such a change, an early one alone; None where no two answers could be
    compared.
    """
    moving: Mapping[str, bool] = field(default_factory=dict)
    """By communicator, whether it has changed since the answer before.

    Those alone that are in both.
    """
    _marks: Mapping[str, Mapping[object, int]] = field(default_factory=dict)

    def update(self, status: Status, now: float, *, early: bool = False) -> None:
        """Take a RAS answer that was given at `now`, in Unix time.

        One that came `early`, before its interval was over, tells that nothing moves, but no more
        than once: alerts count answers for the time that they stand for.
        """
        marks = {
            communicator.name: communicator.marks
            for communicator in status.communicators
            if communicator.name
        }
        changes = {
            name: _changed(self._marks.get(name, {}), after) for name, after in marks.items()
        }
        self.moving = {name: changed for name, changed in changes.items() if changed is not None}
        self._marks, self.answered = marks, now
        if not self.moving:
            self.idle = None
        elif any(self.moving.values()):
            self.idle, self.last = 0, now
        elif not (early and self.idle):
            self.idle = (self.idle or 0) + 1

    def stands_still(self, communicator: Communicator) -> bool:
        """Tell whether a communicator is known not to have changed since the answer before."""
        return self.moving.get(communicator.name) is False


def _changed(before: Mapping[object, int], after: Mapping[object, int]) -> bool | None:
    """Tell whether a count of RAS differs; None where there is nothing to compare."""
    common = before.keys() & after.keys()
    return any(before[mark] != after[mark] for mark in common) if common else None
