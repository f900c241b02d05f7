"""The progress of a job from one RAS answer to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.jobs.ras.status import Communicator, Status


@dataclass(slots=True)
class JobProgress:
    """The progress of one job.

    Only ranks and communicators that are in both answers are compared: one that appears or falls
    silent is not progress. A count that is lower than before belongs to another communicator of the
    same name, and counts as a change.
    """

    answered: float | None = None
    """Unix time of the last answer."""
    last: float | None = None
    """Unix time of the last answer in which a count had changed; None until the first change."""
    idle: int | None = None
    """Consecutive answers without such a change; an early one counts only as the first.

    None if the last two answers could not be compared.
    """
    moving: Mapping[str, bool] = field(default_factory=dict)
    """Whether each communicator that is in both answers has changed since the previous one."""
    _marks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def update(self, status: Status, now: float, *, early: bool = False) -> None:
        """Record an answer that was given at `now`, in Unix time.

        An `early` answer, before its interval was over, counts as idle only if none did before:
        alerts take the number of idle answers as a measure of time.
        """
        marks = {communicator.name: communicator.marks for communicator in status.communicators}
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
        """Return whether a communicator is known not to have changed since the previous answer."""
        return self.moving.get(communicator.name) is False


def _changed(before: Mapping[int, int], after: Mapping[int, int]) -> bool | None:
    """Return whether a count differs; None if there is nothing to compare."""
    common = before.keys() & after.keys()
    return any(before[mark] != after[mark] for mark in common) if common else None
