"""The training jobs of all members, merged from each node's summary of its own ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.findings.overview import state_of_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_JOBS = 200
"""Most jobs shown that are well."""
MAX_TROUBLED = 1000
"""Most jobs shown that are not: every job comes from a member, who may invent some."""
_TROUBLED = ("hung", "failed", "stalled")
"""States of jobs that come first, in this order; then those with a loss that is not finite."""
OUT_OF_DATE = "out of date"
"""State of what is known only from old answers: the job may have ended since."""


def merged(
    current: Iterable[tuple[str, Mapping[str, Any]]], old: Iterable[tuple[str, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Return each job of the fleet, merged from the summaries of all its nodes; the worst first.

    Of a job that only `old` summaries show, nothing is returned that may have changed.
    """
    jobs: dict[str, dict[str, Any]] = {}
    states: dict[str, list[tuple[str, str]]] = {}
    for node, answer in current:
        for told in answer["jobs"]:
            _add(jobs.setdefault(told["job"], _empty(told["job"], "")), node, told)
            states.setdefault(told["job"], []).append((told["state"], told.get("cause", "")))
    for name, job in jobs.items():
        job["state"] = state_of_all(states[name])
        if job["state"] != "paused":
            job["pause"] = None
        if job["state"] != "training":
            job["steps_per_minute"] = None
    gone: dict[str, dict[str, Any]] = {}
    for node, answer in old:
        for told in answer["jobs"]:
            if told["job"] not in jobs:
                job = gone.setdefault(told["job"], _empty(told["job"], OUT_OF_DATE))
                job["nodes"].append(node)
                job["ranks"] += told["ranks"]
                job["world_size"] = job["world_size"] or told.get("world_size")
    jobs |= gone
    return sorted(jobs.values(), key=lambda job: (_turn(job), job["job"]))


def shortened(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the jobs that are shown of all, which are in the order of `merged`: the troubled ones,
    and some that are well.
    """
    troubled = sum(_turn(job) <= len(_TROUBLED) for job in jobs)
    return jobs[: max(min(troubled, MAX_TROUBLED), MAX_JOBS)]


def _turn(job: Mapping[str, Any]) -> int:
    """Return the place of a job among the kinds of trouble, which end at the number of states."""
    if job["state"] in _TROUBLED:
        return _TROUBLED.index(job["state"])
    return len(_TROUBLED) + int(job["loss"] != "not finite")


def _empty(name: str, state: str) -> dict[str, Any]:
    return {
        "job": name,
        "nodes": [],
        "ranks": 0,
        "world_size": None,
        "step": None,
        "step_highest": None,
        "steps_per_minute": None,
        "state": state,
        "loss": "unknown",
        "pause": None,
        "culprits": [],
        "slowest": None,
    }


def _add(job: dict[str, Any], node: str, told: Mapping[str, Any]) -> None:
    """Add one node's part of a job to the fleet's entry for it."""
    job["nodes"].append(node)
    job["ranks"] += told["ranks"]
    job["world_size"] = job["world_size"] or told.get("world_size")
    lowest, highest = told.get("step"), told.get("step_highest")
    if lowest is not None:
        job["step"] = lowest if job["step"] is None else min(job["step"], lowest)
    if highest is not None:
        job["step_highest"] = max(job["step_highest"] or 0, highest)
    pace = told.get("steps_per_minute")
    if pace is not None:
        job["steps_per_minute"] = min(job["steps_per_minute"] or pace, pace)
    if told["loss"] == "not finite" or job["loss"] == "unknown":
        job["loss"] = told["loss"]
    cause = told.get("cause")
    if told["state"] == "paused":
        job["pause"] = cause
    for rank in told.get("culprits", ()):
        job["culprits"].append({"rank": rank, "node": node, "cause": cause})
    ratio = told.get("slowest_ratio")
    if ratio is not None and ratio > (job["slowest"] or {"ratio": 0})["ratio"]:
        job["slowest"] = {"rank": told["slowest"], "node": node, "ratio": ratio}
