"""Suspicions: which jobs may be hung, long before that is certain.

A hang is certain when a job's ranks have been silent for twice their longest silence of the last
hours. Half of that already exceeds any usual silence, and leaves time to query other sources: NCCL
RAS needs two answers to show that nothing moves. A rank that is stopped or has failed is reason
enough at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.jobs.hangs.exits import ExitKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dshealthd.jobs.hangs.hang import RankState

SHARE = 0.5
"""Share of the silence bound from which a job is suspected."""
AGAIN_AFTER = 5.0
"""Seconds after which a lasting suspicion is reported once more, so that between the two answers
the job makes either more than one step or none.
"""


@dataclass(slots=True)
class _Suspicion:
    since: float
    told_again: bool = False


class Suspicions:
    """The suspected jobs, remembered so that each suspicion is reported at most twice."""

    def __init__(self) -> None:
        self._suspected: dict[str, _Suspicion] = {}

    def look(self, jobs: Mapping[str, Sequence[RankState]], now: float) -> Iterator[str]:
        """Yield the jobs to report at monotonic time `now`: new suspicions, lasting ones once."""
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
    """Return whether a job's ranks on this node look as at the beginning of a hang."""
    living = [rank for rank in ranks if rank.ended is None]
    if not living:
        return False
    if any(rank.stopped for rank in living):
        return True
    if any(rank.ended not in {None, ExitKind.ENDED} for rank in ranks):
        return True
    return all(rank.silence > SHARE * rank.bound for rank in living)
