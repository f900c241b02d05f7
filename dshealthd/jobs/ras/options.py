"""How training jobs are asked by NCCL's RAS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import CollectorOptions
from dshealthd.core.options import Bytes, Duration, option

if TYPE_CHECKING:
    from collections.abc import Iterator

SPARE = 2.0
"""Seconds that a collection needs beside the queries."""


@dataclass(frozen=True, kw_only=True)
class NcclRasOptions(CollectorOptions):
    """Options of the queries."""

    interval: Duration = option(
        "15s",
        "Time from one look at the jobs to the next, and from one query to the next of a job "
        "that is not well.",
        minimum="1s",
    )
    # Each query goes through all processes of a job. 30 s halves them against asking at each look;
    # longer would delay pages by as much, as no progress shows in the second answer after a hang.
    healthy_interval: Duration = option(
        "30s",
        "Time from one query to the next of a job that is well: no rank in trouble, and operations "
        "launched since the answer before.",
        minimum="1s",
    )
    deadline: Duration = option(
        "20s",
        "How long all queries, or reading one answer, may take until the worker is given up.",
        minimum="1s",
    )
    timeout: Duration = option(
        "12s",
        "How long a job may take to answer; NCCL needs up to 10 s where processes are stopped.",
        minimum="1s",
    )
    max_jobs: int = option(
        8,
        "Training jobs that are asked: users take turns, the oldest first.",
        minimum=1,
        maximum=100,
    )
    max_bytes: Bytes = option(
        Bytes(16 << 20),
        "Length of an answer beyond which it is refused. A rank takes some 600 bytes for "
        "each communicator.",
        minimum=Bytes(1 << 16),
    )

    ask_unknown_releases: bool = option(
        False,
        "Whether to ask jobs whose NCCL release is unknown or is not known to be safe, in JSON "
        "alone. Releases that are known to be unsafe are never asked.",
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of NCCL's RAS whose values cannot be used, and why."""
        if self.deadline < self.timeout + SPARE:
            yield "deadline", f"must be at least {SPARE:g} s more than timeout ({self.timeout})"
