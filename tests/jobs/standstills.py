"""The standstills of which an agent exported some samples, for scenes that are written as these."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dshealthd.core.collector import Sample
from dshealthd.findings.series import Series
from dshealthd.findings.work import work
from dshealthd.jobs.hangs.classes import HANGS, Culprit, HangClass
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.jobs.hangs.states import RankState
from dshealthd.linux.activity import ThreadState
from dshealthd.training.message import Phase, StepStage


def rank_state(silence: float, **fields: object) -> RankState:
    """Return the state of a rank that has been silent for so many seconds."""
    of_rank = {
        "rank": 0,
        "pid": 100,
        "start": 7,
        "step": 50,
        "phase": Phase.TRAINING,
        "stage": StepStage.BACKWARD,
        "bound": 30.0,
        "state": ThreadState.SLEEPING,
    }
    return RankState(silence=silence, **(of_rank | fields))  # type: ignore[arg-type] # its fields


def standstills(samples: Iterable[Sample], wall: float = 0.0) -> dict[str, Standstill]:
    """Return the jobs that stand still, by name; `wall` is the Unix time in seconds."""
    series = Series(samples)
    return {
        labels["training_job"]: _standstill(series, labels["training_job"], value == 1, wall)
        for labels, value in series("job_hang")
        if labels["class"] != HangClass.NONE
    }


def _standstill(series: Series, job: str, shown: bool, wall: float) -> Standstill:  # noqa: FBT001
    of_job = {"training_job": job}
    classes = [labels["class"] for labels, _ in series("job_hang", **of_job)]
    reason = HangClass(next(name for name in classes if name != HangClass.NONE))
    late = [value for _, value in series("job_overdue_seconds", **of_job) if value > 0]
    overdue = min(late, default=series.value("job_silent_overdue_seconds", **of_job) or 0.0)
    hold = series.value("job_hang_patience_seconds", **of_job)
    hold = 0.0 if shown else math.inf if hold is None else hold
    if not shown and reason in HANGS:
        hold = max(hold, overdue + 1.0)
    sizes = [value for _, value in series("job_world_size", **of_job)]
    sizes += [float(labels["world_size"] or 0) for labels, _ in series("job_info", **of_job)]
    here = len({labels["rank"] for labels, _ in series("job_step", **of_job)})
    bounds = [value for _, value in series("job_step_bound_seconds", **of_job)]
    return Standstill(
        job=job,
        reason=reason,
        culprits=tuple(
            (int(labels["rank"]), Culprit(labels["reason"]))
            for labels, _ in series("job_hang_culprit_info", **of_job)
        ),
        ranks=(rank_state(overdue + min(bounds, default=0.0)),),
        since=wall - overdue,
        whole=0 < max(sizes, default=0) <= here,
        overdue=overdue,
        hold=hold,
        work=work(series, job),
    )
