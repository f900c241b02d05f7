"""Findings about jobs without heartbeats that wait: in a collective, or for ranks to arrive."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from dshealthd.core.collector import gauge
from dshealthd.core.text import several
from dshealthd.findings import launches
from dshealthd.findings.finding import Sign
from dshealthd.findings.past import MINUTES_5
from dshealthd.findings.series import Series, by, of_gpus
from dshealthd.findings.settings import likely
from dshealthd.findings.work import work
from dshealthd.jobs.hangs.exits import FAILURES
from dshealthd.jobs.hangs.silence import FLOOR, UNKNOWN

WAITING = gauge(
    "dshealthd_job_gpus_waiting",
    "GPUs of the job on this node that seem to wait in a collective: kernels run all the time, "
    "but memory and bus are idle and power is low. Absent if unknown.",
    "training_job",
)
EXPORTED = (WAITING,)
"""Judged here from the last samples, and exported for the rules that compare the nodes of a job."""
TROUBLES = {
    "stopped": "is stopped (SIGSTOP)",
    "blocked": "hangs in kernel I/O",
    **FAILURES,
    "ended": "has ended",
    "unknown": "has ended",
}
"""What is wrong with a rank by its process, in words; not one that was asked to end."""
UNLESS_AT_WORK = frozenset({"blocked", "ended", "unknown"})
"""Those that a job at work explains: a slow disk, or work after the last step."""
IDLE_SECONDS = 60.0
"""Seconds for which a job must be idle for those."""
BUS = ("pcie_transmit_bytes_total", "pcie_receive_bytes_total")
BUS_SECONDS = 60.0
"""Seconds over which traffic is measured: a batch is copied in bursts."""


def stalls(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose collectives do not complete, and count their waiting GPUs.

    Only for jobs that have no heartbeats to be judged by, which are more precise.
    """
    for job, ranks in of_processes(series).items():
        if not judged_by_heartbeats(series, job) and not work(series, job).says:
            yield Sign(
                "DshealthdJobStalled",
                several(ranks.values()),
                job=job,
                source="job_rank_trouble_seconds",
                hold=0.0 if ranks.keys() - UNLESS_AT_WORK else None,
            )
    waiting = _waiting(series)
    for job, count in waiting.items():
        series.add([WAITING(float(count), job)])
    name, limit = "job_nccl_answers_without_progress", "ras_idle_answers"
    answers = {labels["training_job"]: value for labels, value in series(name)}
    for job in {**waiting, **answers}:
        if judged_by_heartbeats(series, job):
            continue
        idle = answers.get(job, 0.0)
        troubles, behind = _troubles(series, job), _behind(series, job)
        certain = bool(troubles) and idle >= series.limit(limit)
        # A single look at GPUs and ranks that wait for a moment shows nothing, and they wait in any
        # job of which a rank validates alone, or writes a checkpoint.
        waits = waiting.get(job) and not launches.launches_lately(series, job)
        lasting = series.remembers and ((idle > 0 and behind) or waits)
        if certain or (lasting and not work(series, job).says):
            counted = launches.ranks_behind(series, job)
            reason = f"its GPUs here run kernels that move no data{likely(series, job)}{counted}"
            yield Sign(
                "DshealthdJobStalled",
                several(troubles) or several(behind) or reason,
                job=job,
                limit=limit if certain else None,
                source=name if idle else "gpu_utilization_ratio",
                # What ranks that wait look like while rank 0 writes a checkpoint, too.
                hold=0.0 if certain else None,
            )


def of_processes(series: Series) -> dict[str, dict[str, str]]:
    """Return which ranks of each job have ended or are stopped by their processes, in words."""
    found: dict[str, dict[str, str]] = {}
    for labels, seconds in series("job_rank_trouble_seconds", what=set(TROUBLES)):
        job, what = labels["training_job"], labels["what"]
        if not series.has("job_watchdog_seconds", training_job=job):
            continue  # it has ended here, and does not stall
        idle = series.value("job_idle_seconds", training_job=job) or 0.0
        if seconds >= FLOOR and (what not in UNLESS_AT_WORK or idle >= IDLE_SECONDS):
            pid = f" (pid {labels['pid']})" if what in {"stopped", "blocked"} else ""
            found.setdefault(job, {})[what] = f"rank {labels['rank']}{pid} {TROUBLES[what]}"
    return found


def arrivals(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs of which some ranks have begun a communicator that others lack."""
    name = "job_nccl_ranks"
    for job, count in by(series(name, state="init"), "training_job", max).items():
        if count > 0 and not series.has("job_step", training_job=job):
            named = several(_troubles(series, job)) or "NCCL names none in trouble"
            reason = "its ranks have been initializing a communicator for minutes, without a step"
            yield Sign(
                "DshealthdRanksDoNotMeet",
                f"{reason}: {named}",
                job=job,
                value=count,
                source=name,
                apart="communicator",
                hold=MINUTES_5,
            )


def judged_by_heartbeats(series: Series, job: str) -> bool:
    """Return whether the job's heartbeats show if it hangs.

    Not while a rank has the bound of an unknown pace, as after a restart of the agent, unless it is
    in a marked pause.
    """
    found = series.standstills.get(job)
    bounds = [value for _, value in series("job_step_bound_seconds", training_job=job)]
    paused = any(
        value == 1 and labels["phase"] != "training"
        for labels, value in series("job_phase", training_job=job)
    )
    hung = found is not None and found.shown
    return hung or paused or (bool(bounds) and all(bound < UNKNOWN for bound in bounds))


def _troubles(series: Series, job: str) -> list[str]:
    """Return the ranks that NCCL's RAS says are dead, do not respond or have failed."""
    return [
        f"rank {labels['rank']} on {labels['host']} ({labels['trouble'].replace('_', ' ')})"
        for labels, _ in series("job_nccl_rank_trouble_info", training_job=job)
    ]


def _behind(series: Series, job: str) -> list[str]:
    """Return the ranks that have launched fewer operations than the others."""
    return [
        f"rank {labels['rank']} on {labels['host']} (behind)"
        for labels, value in series("job_nccl_rank_operations_behind", training_job=job)
        if value > 0
    ]


def _waiting(series: Series) -> Counter[str]:
    """Return the number of waiting GPUs by job, 0 for those of which none waits.

    A GPU of which no job is known may be that of an idle server, and is nobody's here; so is one
    whose processes are not seen, where several jobs are.
    """
    utilization = of_gpus(series, "gpu_utilization_ratio")
    users: dict[tuple[str, ...], str] = {}
    for labels, _ in series("job_gpu_info"):
        gpu = labels["gpu"], labels["uuid"]
        users.setdefault(gpu, labels["training_job"])
    here = {
        point.labels["training_job"] for name in ("job_ranks", "job_step") for point in series(name)
    } - set(users.values())
    (unseen,) = here if len(here) == 1 and utilization else ("",)
    found = Counter(dict.fromkeys((*users.values(), *([unseen] if unseen else ())), 0))
    found.update(job for gpu in waiting_gpus(series) if (job := users.get(gpu, unseen)))
    return found


def waiting_gpus(series: Series) -> set[tuple[str, ...]]:
    """Return the GPUs that seem to wait in a kernel: their index and UUID."""
    limits = series.limits
    power = of_gpus(series, "gpu_power_watts")
    most = of_gpus(series, "gpu_power_limit_watts", limit="enforced")
    memory = of_gpus(series, "gpu_memory_activity_ratio")
    traffic = _traffic(series)
    return {
        gpu
        for gpu, busy in of_gpus(series, "gpu_utilization_ratio").items()
        if busy > limits.hang_utilization_ratio
        and memory.get(gpu, 1.0) < limits.hang_memory_activity_ratio
        and gpu in power
        and power[gpu] < limits.hang_power_ratio * most.get(gpu, 0.0)
        and traffic[gpu] <= limits.hang_pcie_bytes_per_second
    }


def _traffic(series: Series) -> Mapping[tuple[str, ...], float]:
    """Return the bytes per second that GPUs move over PCIe, by GPU; 0 where that is unknown."""
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for name in BUS:
        for labels, moved in series.rise(name, BUS_SECONDS):
            found[labels["gpu"], labels["uuid"]] += moved / BUS_SECONDS
    for labels, rate in series("pcie_throughput_bytes_per_second"):
        found[labels["gpu"], labels["uuid"]] += rate
    return found


RULES = (stalls, arrivals)
