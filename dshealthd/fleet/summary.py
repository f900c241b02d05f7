"""What a node sends of itself to other members: its verdict, its worst findings and its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd import __version__
from dshealthd.findings.finding import State
from dshealthd.probe.peers.messages import MAX_FINDINGS, MAX_JOBS, summary_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dshealthd.findings.finding import Verdict

KEPT = 2.0
"""Seconds for which a summary is cached: members may query it often, and making it takes 2 ms."""
MAX_CULPRITS = 8
MAX_CAUSE = 16
MAX_RANK = 10**7
MAX_SECONDS = 1e9
MAX_NUMBERS = {"world_size": 10**7, "step": 2**53, "step_highest": 2**53, "steps_per_minute": 1e9}
"""Largest values that messages allow: an environment may claim any world size."""


class SummaryCache:
    """Makes a node's summary, and caches it for a moment."""

    def __init__(
        self,
        verdict: Callable[[], Verdict],
        jobs: Callable[[], Iterable[Mapping[str, Any]]],
        monotonic: Callable[[], float],
    ) -> None:
        """`verdict` and `jobs` return the current state, as in the status document."""
        self._verdict, self._jobs, self._monotonic = verdict, jobs, monotonic
        self._made = -KEPT
        self._kept: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the summary as the answer of the peer API's method `summary`."""
        now = self._monotonic()
        if now - self._made >= KEPT:
            self._kept, self._made = summary(self._verdict(), self._jobs()), now
        return self._kept


def summary(verdict: Verdict, jobs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of a verdict and the node's jobs, in order, for other members."""
    found = verdict.findings
    return {
        "version": summary_text(__version__),
        "verdict": str(verdict.state),
        "problems": sum(finding.severity is not State.UNKNOWN for finding in found),
        "unreadable": sum(finding.severity is State.UNKNOWN for finding in found),
        "findings": [
            {
                "slug": summary_text(finding.slug),
                "severity": str(finding.severity),
                "part": summary_text(finding.part),
                "summary": summary_text(finding.summary),
            }
            for finding in found[:MAX_FINDINGS]
        ],
        "jobs": [_job(job) for job in list(jobs)[:MAX_JOBS]],
    }


def _job(job: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "job": summary_text(job["job"]),
        "state": summary_text(job["state"]),
        "ranks": job["ranks_here"],
        "loss": summary_text(job["loss"]),
    }
    for name, most in MAX_NUMBERS.items():
        if job[name] is not None and 0 <= job[name] <= most:
            told[name] = job[name]
    if standstill := job["hang"] or job.get("stall"):
        told["cause"] = summary_text(standstill["cause"])[:MAX_CAUSE]
    if job["hang"]:
        ranks = [entry["rank"] for entry in job["hang"]["culprits"]]
        told["culprits"] = [rank for rank in ranks if rank <= MAX_RANK][:MAX_CULPRITS]
    told["work"] = [
        {name: value for name, value in one.items() if value is not None}
        | {"role": summary_text(one["role"])}
        for one in job["work"]
        if one["rank"] <= MAX_RANK
        and all((one[name] or 0.0) <= MAX_SECONDS for name in ("work_seconds", "wait_seconds"))
    ]
    return told
