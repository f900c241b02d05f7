"""Options of the queries to NCCL's RAS of training jobs."""

from __future__ import annotations

from dataclasses import dataclass

from dshealthd.core.collector import CollectorOptions
from dshealthd.core.options import Duration, constant, option


@dataclass(frozen=True, kw_only=True)
class NcclRasOptions(CollectorOptions):
    """Options of the queries."""

    interval: Duration = option(
        "15s",
        "Time between checks of the jobs, and between queries of a job that is not healthy.",
        minimum="1s",
    )
    healthy_interval: Duration = constant("30s")
    """Time between two queries of a healthy job: no rank in trouble, and operations launched since
    the previous answer. Each query goes through all processes of a job: 30 s halves their number
    compared with a query at each check. A longer time would delay pages as much, because a hang
    shows only in the second answer after it.
    """
    timeout: Duration = constant("12s")
    """Answer timeout of a job; NCCL needs up to 10 s if processes are stopped."""
    deadline: Duration = constant("20s")
    """Time limit for all queries, or for reading one answer, after which the worker is killed."""
    ask_unknown_releases: bool = option(
        False,
        "Whether to query jobs whose NCCL release is unknown or untested, in JSON only. "
        "Releases known to be unsafe are never queried.",
    )
