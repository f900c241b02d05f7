"""Suspicions: which jobs may be about to hang, long before that is certain.

A hang is certain when the ranks of a job have been silent for twice as long as they ever were in
the last hours. Half of that is longer than any silence that was usual, and early enough to ask what
else knows of the job while it is: NCCL's RAS takes two answers to tell that nothing moves. A rank
that is stopped or has failed is reason enough at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.jobs.hangs.exits import ExitKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dshealthd.jobs.hangs.hang import RankState

SHARE = 0.5
"""Of the silence from which a job is hung."""
AGAIN_AFTER = 5.0
"""Seconds after which a suspicion that lasts is told once more, so that two answers differ by more
than a step of the training, or by none.
"""


@dataclass(slots=True)
class _Suspicion:
    since: float
    told_again: bool = False


class Suspicions:
    """Remembers which jobs are suspected, so that each suspicion is told twice and no more."""

    def __init__(self) -> None:
        self._suspected: dict[str, _Suspicion] = {}

    def look(self, jobs: Mapping[str, Sequence[RankState]], now: float) -> Iterator[str]:
        """Yield the jobs to tell of, at monotonic time `now`: those whose suspicion is new, and
        those whose suspicion lasts, once.
        """
        suspected = {job for job, ranks in jobs.items() if suspicious(ranks)}
        self._suspected = {job: known for job, known in self._suspected.items() if job in suspected}
        for job in sorted(suspected):
            known = self._suspected.get(job)
            if known is None:
                self._suspected[job] = _Suspicion(now)
                yield job
            elif not known.told_again and now - known.since >= AGAIN_AFTER:
                known.told_again = True
                yield job


def suspicious(ranks: Sequence[RankState]) -> bool:
    """Tell whether the ranks of a job on this node look as at the beginning of a hang."""
    living = [rank for rank in ranks if rank.ended is None]
    if not living:
        return False
    if any(rank.stopped for rank in living):
        return True
    if any(rank.ended not in {None, ExitKind.ENDED} for rank in ranks):
        return True
    return all(rank.silence > SHARE * rank.bound for rank in living)
