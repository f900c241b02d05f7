"""Findings about jobs that hold GPUs and use none of them.

No other job gets them meanwhile. A job uses none if no process is on as many GPUs of
this node as it holds, or if all GPUs with a process of it run no kernel. What is not known is use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dshealthd.findings.finding import Sign
from dshealthd.findings.idleness import occupied
from dshealthd.findings.series import Point, Series, of_gpus


def unused(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs of which no GPU that they hold here is used."""
    name = "job_held_gpus"
    runs: defaultdict[str, list[Point]] = defaultdict(list)
    for point in series(name):
        runs[point.labels["training_job"]].append(point)
    limits = series.limits
    for job, points in runs.items():
        # A step holds some of its job's GPUs; the largest number is certain.
        held = max(point.value for point in points)
        interactive = any(point.labels["terminal"] == "true" for point in points)
        interactive = interactive or occupied(series, job)
        seconds = limits.unused_interactive_seconds if interactive else limits.unused_seconds
        if seconds and (reason := _unused(series, job, int(held))):
            yield Sign(
                "DshealthdGpusUnused", reason, job=job, value=held, source=name, hold=seconds
            )


def _unused(series: Series, job: str, held: int) -> str:
    """Return how it shows that a job uses none of its GPUs; empty if it uses one, or if that is
    not known.
    """
    processes = of_gpus(series, "gpu_compute_processes")
    used = {gpu for gpu, count in processes.items() if count}
    if (
        processes.keys() != of_gpus(series, "gpu_up").keys()
        or series.value("gpu_compute_processes_unknown") != 0
        or used - of_gpus(series, "job_gpu_info").keys()  # by whom, as from a container's daemon
        or series.has("mig_device_info")  # no figure says whether a part of a GPU computes
        or job in series.standstills  # hung, suspended or in a pause, which is judged elsewhere
        or not series.has("job_rank_cpu_cores", training_job=job)  # a signal has stopped it
    ):
        return ""
    if not (own := of_gpus(series, "job_gpu_info", training_job=job)):
        return "has no process on any of them" if len(processes) - len(used) >= held > 0 else ""
    busy = of_gpus(series, "gpu_utilization_ratio")
    idle = all(busy.get(gpu) == 0 for gpu in own)
    return "runs no kernel on any of them" if idle else ""


RULES = (unused,)
