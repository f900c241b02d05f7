"""The jobs of the fleet: what all their nodes report of each, merged."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from dshealthd.core.documents import LeftOut
from dshealthd.findings import overview
from dshealthd.jobs import own_work

MAX_JOBS = 200
"""Most jobs shown that are well."""
MAX_TROUBLED = 1000
"""Most jobs shown that are not: every job comes from a member, who may invent some."""
_TROUBLED = ("hung", "failed", "stalled")
"""States of jobs that come first, in this order; then those with a loss that is not finite."""
OUT_OF_DATE = "out of date"
"""State of what is known only from old answers: the job may have ended since."""
_FIELDS = overview.JobPart._fields
"""Fields of a summary's job that nodes agree on or that are added up."""


def merge_jobs(
    current: Iterable[tuple[str, Mapping[str, Any]]],
    old: Iterable[tuple[str, Mapping[str, Any]]],
    left_out: LeftOut | None = None,
) -> list[dict[str, Any]]:
    """Return each job of the fleet, merged from the summaries of all its nodes; the worst first.

    Of a job that only `old` summaries show, nothing is returned that may have changed. `left_out`
    learns which jobs were left out.
    """
    now, before = _by_job(current), _by_job(old)
    jobs = (left_out or LeftOut()).each(
        "job",
        [*now.items(), *((name, parts) for name, parts in before.items() if name not in now)],
        operator.itemgetter(0),
        lambda job: _job(*job, is_old=job[0] not in now),
    )
    return sorted(jobs, key=lambda job: (_turn(job), job["job"]))


def shown_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the jobs that `/fleet` shows of all, in the order of `merge_jobs`: the troubled ones,
    and some that are well.
    """
    troubled = sum(_turn(job) <= len(_TROUBLED) for job in jobs)
    return jobs[: max(min(troubled, MAX_TROUBLED), MAX_JOBS)]


def _turn(job: Mapping[str, Any]) -> int:
    """Return the place of a job among the kinds of trouble, which end at the number of states."""
    if job["state"] in _TROUBLED:
        return _TROUBLED.index(job["state"])
    return len(_TROUBLED) + int(job["loss"] != "not finite")


def _by_job(
    answers: Iterable[tuple[str, Mapping[str, Any]]],
) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """Return what each member of the fleet says of each job."""
    jobs: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for node, answer in answers:
        for entry in answer["jobs"]:
            jobs.setdefault(entry["job"], []).append((node, entry))
    return jobs


def _job(
    name: str, parts: list[tuple[str, Mapping[str, Any]]], *, is_old: bool = False
) -> dict[str, Any]:
    """Return the fleet's entry for a job; `is_old` is whether only old answers show it."""
    whole = overview.merge_job(
        [
            overview.JobPart(**{field: entry[field] for field in _FIELDS if field in entry})
            for _, entry in parts
        ]
    )
    if is_old:
        whole = overview.JobPart(OUT_OF_DATE, ranks=whole.ranks, world_size=whole.world_size)
    pauses = [entry.get("cause") for _, entry in parts if entry["state"] == "paused"]
    return {
        "job": name,
        "nodes": [node for node, _ in parts],
        **{field: value for field, value in whole._asdict().items() if field != "cause"},
        "pause": pauses[-1] if whole.state == "paused" else None,
        # Nobody waits for a rank while another node shows why they wait.
        "culprits": [
            {"rank": rank, "node": node, "cause": entry.get("cause")}
            for node, entry in parts
            for rank in entry.get("culprits", ())
            if whole.state == "hung"
        ],
        "slow": []
        if is_old
        else [
            {"rank": one.rank, "node": one.node, "ratio": round(one.ratio, 2)}
            for one in own_work.slow_ranks(
                [
                    part
                    for node, entry in parts
                    for part in own_work.told(node, entry.get("own_work", ()))
                ]
            )
            if one.loss > own_work.LOSS
        ],
    }
