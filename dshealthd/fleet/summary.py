"""What a node sends of itself to other members: its verdict, its worst findings and its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dshealthd import __version__
from dshealthd.core.documents import LeftOut
from dshealthd.core.schema import SchemaError, Type
from dshealthd.core.text import plural
from dshealthd.findings.finding import State, Verdict
from dshealthd.probe.peers.messages import (
    JOB,
    MAX_CULPRITS,
    MAX_FINDINGS,
    MAX_JOBS,
    MAX_OWN_WORK,
    OWN_WORK,
    RANK_NUMBER,
    summary_text,
)

KEPT = 2.0
"""Seconds for which a summary is cached: members may query it often, and making it takes 2 ms."""
NUMBERS = ("world_size", "step", "step_highest", "steps_per_minute", "attempts")


class SummaryCache:
    """Makes a node's summary, and caches it for a moment."""

    def __init__(
        self,
        verdict: Callable[[], Verdict],
        jobs: Callable[[], Iterable[Mapping[str, Any]]],
        hours: Callable[[], str],
        monotonic: Callable[[], float],
    ) -> None:
        """`verdict` and `jobs` return the current state, as in the status document, and `hours`
        what `NodeRecord.hours` does.
        """
        self._verdict, self._jobs, self._hours = verdict, jobs, hours
        self._monotonic = monotonic
        self._made = -KEPT
        self._kept: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the summary as the answer of the peer API's method `summary`."""
        now = self._monotonic()
        if now - self._made >= KEPT:
            told = summary(self._verdict(), self._jobs())
            self._kept, self._made = told | {"hours": self._hours()}, now
        return self._kept


def summary(verdict: Verdict, jobs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of a verdict and the node's jobs, in order, for other members."""
    found = verdict.findings
    left_out = LeftOut()
    known = list(jobs)
    if (more := len(known) - MAX_JOBS) > 0:
        left_out.add_reason(plural(more, "job"), f"a summary holds the first {MAX_JOBS} of a node")
    told = left_out.each("job", known[:MAX_JOBS], _name, lambda job: JOB.write(_job(job)))
    whole = {
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
        "jobs": list(told),
    }
    if verdict.watched:
        whole["watched"] = len(verdict.watched)
    if why := [f"{one['part']}: {one['reason']}" for one in left_out.document()]:
        whole["left_out"] = [*map(summary_text, why)][:MAX_JOBS]
    return whole


def _name(job: Mapping[str, Any]) -> str:
    return str(job["job"])


def _fits(kind: Type, value: object) -> bool:
    """Return whether a summary may have a value: an environment may claim any world size."""
    try:
        kind.write(value, "")
    except SchemaError:
        return False
    return True


def _job(job: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "job": summary_text(job["job"]),
        "state": summary_text(job["state"]),
        "ranks": job["ranks_here"],
        "loss": summary_text(job["loss"]),
    }
    told |= {name: job[name] for name in NUMBERS if _fits(JOB.optional[name], job[name])}
    if standstill := job["hang"] or job.get("stall"):
        told["cause"] = summary_text(standstill["cause"])
    if job["hang"]:
        ranks = [entry["rank"] for entry in job["hang"]["culprits"]]
        told["culprits"] = [rank for rank in ranks if _fits(RANK_NUMBER, rank)][:MAX_CULPRITS]
    work = [one | {"role": summary_text(one["role"])} for one in job["own_work"]]
    told["own_work"] = [one for one in work if _fits(OWN_WORK, one)][:MAX_OWN_WORK]
    return told
