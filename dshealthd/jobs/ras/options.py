"""Options of the queries to NCCL's RAS of training jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import CollectorOptions
from dshealthd.core.options import Bytes, Duration, option
from dshealthd.jobs import shares

if TYPE_CHECKING:
    from collections.abc import Iterator

SPARE = 2.0
"""Seconds that a collection needs in addition to the queries."""


@dataclass(frozen=True, kw_only=True)
class NcclRasOptions(CollectorOptions):
    """Options of the queries."""

    interval: Duration = option(
        "15s",
        "Time between two checks of the jobs, and between two queries of a job that is not "
        "healthy.",
        minimum="1s",
    )
    # Each query goes through all processes of a job. 30 s halves their number compared with a query
    # at each check. A longer time would delay pages as much, because a hang shows only in the
    # second answer after it.
    healthy_interval: Duration = option(
        "30s",
        "Time between two queries of a healthy job: no rank in trouble, and operations launched "
        "since the previous answer.",
        minimum="1s",
    )
    deadline: Duration = option(
        "20s",
        "Time limit for all queries, or for reading one answer, after which the worker is killed.",
        minimum="1s",
    )
    timeout: Duration = option(
        "12s",
        "Answer timeout of a job; NCCL needs up to 10 s if processes are stopped.",
        minimum="1s",
    )
    max_jobs: int = shares.max_jobs(8, "are queried")
    max_bytes: Bytes = option(
        Bytes(16 << 20),
        "Largest answer that is accepted. A rank takes some 600 bytes for each communicator.",
        minimum=Bytes(1 << 16),
    )

    ask_unknown_releases: bool = option(
        False,
        "Whether to query jobs whose NCCL release is unknown or not known to be safe, in JSON "
        "only. Releases that are known to be unsafe are never queried.",
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options with invalid values, and why."""
        if self.deadline < self.timeout + SPARE:
            yield "deadline", f"must be at least {SPARE:g} s more than timeout ({self.timeout})"
