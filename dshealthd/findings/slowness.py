"""Findings about jobs that are slower than they could be: what this node shows of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import product

from dshealthd.core.collector import gauge
from dshealthd.findings import launches
from dshealthd.findings.finding import Sign
from dshealthd.findings.jobs import attempt
from dshealthd.findings.past import HOUR, MINUTES_5
from dshealthd.findings.series import Series, by, keyed, of_gpus, over, short_name
from dshealthd.findings.settings import ranks_named
from dshealthd.jobs.own_work import LOSS, SCALES, NodeRanks, RankFigures, slow_ranks

UTILIZATION = gauge(
    "dshealthd_training_gpu_utilization_ratio", "Mean utilization of the GPUs with a process."
)
_OF = ("training_job", "attempt")
STEP = gauge("dshealthd_attempt_step_seconds", "Median step time of the ranks.", *_OF)
REST = gauge("dshealthd_attempt_gpu_rest", "Inverse of the mean power of the job's GPUs.", *_OF)
"""Derived here, for their past; not exported. Of the inverse, a rise does not become usual for a
day."""
MEAN_SECONDS = 600.0
"""Seconds over which utilization, power and pressure are averaged: they change within each step."""
HELD_SECONDS = 1800.0
"""Seconds for which full GPUs must idle: an evaluation or a rollout takes minutes."""
SHARE_SECONDS = 600.0
"""Seconds for which most of a job's time must go into collectives."""
SLOW = "DshealthdJobSlow"


def starved(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield the finding that GPUs in use hardly compute while tasks queue for the CPUs.

    Or, if they are a training job's, while their memory is full.
    """
    used = series.parts("gpu_compute_processes", "gpu", "uuid")
    now = [value for gpu, value in of_gpus(series, "gpu_utilization_ratio").items() if gpu in used]
    if now:
        series.add([UTILIZATION(sum(now) / len(now))])
    name = short_name(UTILIZATION)
    of_cpus = {"resource": "cpu", "tasks": "some"}
    queued = series.mean("pressure_stalled_ratio", MEAN_SECONDS, full=True, **of_cpus)
    limit = "gpu_utilization_training_ratio"
    waiting = any(ratio > series.limits.cpu_pressure_ratio for _, ratio in queued)
    computed = next((value for _, value in series.mean(name, MEAN_SECONDS, full=True)), None)
    if now and waiting and computed is not None and computed < series.limit(limit):
        yield _starved(computed, "tasks queue for the CPUs", limit)
    elif held := _held(series):
        limit = "gpu_utilization_held_ratio"
        yield _starved(max(held), "their memory is full", limit, hold=HELD_SECONDS)


def _starved(value: float, reason: str, limit: str, hold: float | None = None) -> Sign:
    name = "gpu_utilization_ratio"
    return Sign("DshealthdGpusStarved", reason, value=value, limit=limit, source=name, hold=hold)


def _held(series: Series) -> list[float]:
    """Return the utilization of the GPUs of jobs that are full and hardly compute.

    A server keeps its memory full and computes nothing while nobody asks: what waits for the host
    makes steps, or computes at half of the moments at least. A single look cannot tell.
    """
    name = "gpu_utilization_ratio"
    # Both are asked for each time, because the past is kept of what is asked for.
    medians, made = series.median(name, HELD_SECONDS), series.rise("job_step", HELD_SECONDS)
    limits, total = series.limits, of_gpus(series, "gpu_memory_total_bytes")
    of_jobs = series.parts("job_gpu_info", "gpu", "uuid")
    full = {
        gpu
        for gpu, value in of_gpus(series, "gpu_memory_used_bytes").items()
        if gpu in of_jobs and value > limits.gpu_memory_held_ratio * total.get(gpu, math.inf)
    }
    if not full:
        return []
    at_work = {(labels["gpu"], labels["uuid"]) for labels, value in medians if value > 0}
    stepping = {labels["training_job"] for labels, steps in made if steps > 0}
    at_work |= {
        (labels["gpu"], labels["uuid"])
        for labels, _ in series("job_gpu_info")
        if labels["training_job"] in stepping
    }
    return [
        value
        for gpu, value in of_gpus(series, name).items()
        if gpu in full & at_work and value < limits.gpu_utilization_held_ratio
    ]


def inputs(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose ranks here wait for their input for much of each step."""
    limit = "input_ratio"
    # Medians: an unmarked checkpoint also comes between two steps.
    steps = keyed(series.median("job_step_seconds", MINUTES_5), "training_job", "rank")
    here = series.parts("job_step", "training_job", "rank")
    # Between two steps GPUs may also generate rollouts, or evaluate: a rank waits for its input no
    # longer than all its GPUs are idle.
    busy = keyed(series.mean("gpu_utilization_ratio", MINUTES_5), "gpu", "uuid")
    idle: dict[tuple[str, ...], float] = {}
    for labels, _ in series("job_gpu_info"):
        rank, gpu = (labels["training_job"], labels["rank"]), (labels["gpu"], labels["uuid"])
        idle[rank] = min(1.0 - busy.get(gpu, 0.0), idle.get(rank, 1.0))
    slow: dict[str, list[tuple[float, str]]] = {}
    for labels, value in series.median("job_input_seconds", MINUTES_5):
        rank = labels["training_job"], labels["rank"]
        if rank not in here or not steps.get(rank):
            continue
        share = min(value / steps[rank], idle.get(rank, 1.0))
        if share > series.limit(limit):
            slow.setdefault(rank[0], []).append((share, rank[1]))
    alert, name = "DshealthdInputSlow", "job_input_seconds"
    for job, ranks in slow.items():
        named, worst = ranks_named([rank for _, rank in ranks]), max(ranks)[0]
        yield Sign(alert, named, job=job, value=worst, limit=limit, source=name)


def steps(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose steps take longer than usual, or mostly communicate."""
    times = by(series("job_step_seconds"), "training_job", statistics.median)
    series.add(STEP(seconds, job, attempt(series, job)) for job, seconds in times.items())
    limit, name = "job_slowed_ratio", short_name(STEP)
    hung = {job for job, found in series.standstills.items() if found.shown}
    busy = _busy_as_usual(series)
    told = set()
    for labels, usual in series.usual(name, HOUR, series.limit(limit)):
        job = labels["training_job"]
        now = series.value(name, **labels)
        if now is not None and usual and now > series.limit(limit) * usual and job not in hung:
            told.add(job)
            if job in busy:
                continue  # longer sequences or larger batches
            hosts = launches.late_host(series, job, now)
            ratio, reason = now / usual, f"its steps take longer than they used to{hosts}"
            yield Sign(SLOW, reason, job=job, value=ratio, limit=limit, source="job_step_seconds")
    limit, name = "communication_ratio", "job_communication_seconds_total"
    spent = by(series.rise(name, MINUTES_5, full=True), "training_job", max)
    reason = "its ranks spend more time in collectives than in computing"
    for job, seconds in spent.items():
        if job not in told:
            share = seconds / MINUTES_5
            yield from over(series, SLOW, share, limit, name, reason, job=job, hold=SHARE_SECONDS)


def _busy_as_usual(series: Series) -> set[str]:
    """Return the jobs whose GPUs here draw as much power as they used to: they wait for nothing
    new.
    """
    watts = keyed(series.mean("gpu_power_watts", MEAN_SECONDS), "gpu", "uuid")
    jobs: dict[str, list[float]] = {}
    for labels, _ in series("job_gpu_info"):
        gpu = labels["gpu"], labels["uuid"]
        jobs.setdefault(labels["training_job"], []).append(watts.get(gpu, 0.0))
    rests = {job: len(found) / sum(found) for job, found in jobs.items() if all(found)}
    series.add(REST(value, job, attempt(series, job)) for job, value in rests.items())
    # A GPU that waits for a part of steps that are so much longer draws `waiting` of its power in
    # that part, and less than this times its usual power in all: the bound is half way.
    slowed, waiting = series.limit("job_slowed_ratio"), series.limit("hang_power_ratio")
    within = 2 / (1 + (1 + (slowed - 1) * waiting) / slowed)
    name = short_name(REST)
    return {
        labels["training_job"]
        for labels, usual in series.usual(name, HOUR, within)
        if (now := series.value(name, **labels)) is not None and now <= within * usual
    }


def ranks(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about ranks that are slow beside those of their role on this node.

    A node all of whose ranks are slow sees nothing of it: rules compare nodes, too.
    """
    alert, source = "DshealthdRankSlow", "job_node_work_seconds"
    for (job,) in series.parts("job_node_step_seconds", "training_job"):
        for one in slow_ranks(list(of_job(series, job))):
            if one.loss > LOSS:
                part, value = f"rank {one.rank}", one.ratio
                yield Sign(alert, part=part, job=job, value=value, limit=one.limit, source=source)


def of_job(series: Series, job: str) -> Iterator[NodeRanks]:
    """Yield the own work of a job's ranks as this node exports it, by time and role; ranks differ
    at least as much as in the last hour.
    """
    names, variance = ("training_job", "role", "over", "of"), "job_node_work_variance"
    now = keyed(series(variance), *names)
    lately = keyed(series.mean(variance, HOUR), *names)
    for over_time, (labels, step) in product(
        SCALES, series("job_node_step_seconds", training_job=job)
    ):
        of = {"training_job": job, "role": labels["role"]}
        number = series.value("job_node_role_ranks", **of)
        rank = series.value("job_node_slowest_rank", **of)
        of["over"] = over_time
        slow = series.value("job_node_work_seconds", of="slow", **of)
        usual = series.value("job_node_work_seconds", of="usual", **of)
        if number and rank is not None and slow and usual and step:
            keys = [(job, labels["role"], over_time, kind) for kind in ("between", "within")]
            variances = (max(now.get(key, 0.0), lately.get(key, 0.0)) for key in keys)
            figures = RankFigures(int(rank), slow, usual, *variances)
            yield NodeRanks("", labels["role"], over_time, int(number), step, figures)


RULES = (starved, inputs, steps, ranks)
