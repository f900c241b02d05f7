"""Findings about the settings with which jobs run: the variables that their ranks have here."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.findings.fabric import fabric_up
from dshealthd.findings.finding import Sign

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from dshealthd.findings.series import Series

DEVICES = {
    "absent": "names nothing on this node",
    "down": "names what is down",
    "loopback": "leaves a job of several nodes only the loopback interface",
}
"""What is wrong with a variable that names interfaces or adapters, by the collector's word."""
VALUES = {
    "out_of_range": "has a value out of its range",
    "no_number": "has a value that NCCL reads as a different number",
    "misspelt": "is probably what a misspelt name means",
    "exposed": "opens a port without authentication to other hosts",
}
"""What is wrong with any other NCCL variable."""
OF_DEVICES = frozenset(("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"))
TRANSPORTS = {
    "NCCL_P2P_DISABLE": "NVLink, which is up",
    "NCCL_P2P_LEVEL": "NVLink, which is up",
    "NCCL_SHM_DISABLE": "shared memory between the ranks of a node",
    "NCCL_IB_DISABLE": "InfiniBand or RoCE, which is up",
    "NCCL_NET": "InfiniBand or RoCE, which is up",
}
"""What a variable disables that would work."""
MOST_NAMED = 3
"""Most problems that a finding names; the job's owner corrects them in one place."""


def variables(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose NCCL variables do not mean what was intended."""
    name = "job_environment_problems"
    # By alert and job: what is wrong, with the number of ranks.
    found: dict[tuple[str, str], dict[str, float]] = {}
    for labels, ranks in series(name, problem={*DEVICES, *VALUES}):
        alert, wrong = _wrong(labels)
        if wrong:
            of_job = found.setdefault((alert, labels["training_job"]), {})
            of_job[wrong] = max(of_job.get(wrong, 0.0), ranks)
    for (alert, job), problems in found.items():
        yield _of_job(alert, job, problems, max(problems.values()))


def _of_job(alert: str, job: str, problems: Collection[str], ranks: float) -> Sign:
    """Return the sign that a job on this node has these problems."""
    named = sorted(problems)
    more = [f"and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    return Sign(
        alert=alert,
        part=job,
        job=job,
        labels={"reason": ", ".join([*named[:MOST_NAMED], *more])},
        value=ranks,
        source="dshealthd_job_environment_problems",
    )


def _wrong(labels: Mapping[str, str]) -> tuple[str, str]:
    """Return which finding a problem of a variable is, and what is wrong; empty for none."""
    variable, problem = labels["variable"], labels["problem"]
    if variable in OF_DEVICES and problem in DEVICES:
        return "DshealthdNcclDeviceUnfit", f"{variable} {DEVICES[problem]}"
    if variable.startswith(("NCCL_", "TORCH_NCCL_")) and problem in VALUES:
        return "DshealthdNcclSettingWrong", f"{variable} {VALUES[problem]}"
    return "", ""


def transports(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs that disable a transport although it would work for them."""
    nvlink = any(point.value > 0 for point in series("nvlinks_up"))
    fabric = fabric_up(series)
    found: dict[str, dict[str, float]] = {}
    for labels, ranks in series("job_environment_problems", problem="disabled"):
        job, variable = labels["training_job"], labels["variable"]
        run = {"training_job": job, "run": labels["run"]}
        here, world = series.value("job_ranks", **run), series.value("job_world_size", **run)
        several = here is not None and here > 1
        uses = {
            "NCCL_P2P_DISABLE": several and nvlink,
            "NCCL_P2P_LEVEL": several and nvlink,
            "NCCL_SHM_DISABLE": several,
            "NCCL_IB_DISABLE": here is not None and world is not None and here < world and fabric,
        }
        uses["NCCL_NET"] = uses["NCCL_IB_DISABLE"]
        if uses.get(variable):
            found.setdefault(job, {})[f"{variable} disables {TRANSPORTS[variable]}"] = ranks
    for job, problems in found.items():
        yield _of_job("DshealthdTransportDisabled", job, problems, max(problems.values()))


def placement(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs with several ranks on one GPU that is not divided by MIG."""
    divided = series.parts("mig_device_info", "gpu")
    ranks: dict[tuple[str, str], set[str]] = {}
    for labels, _ in series("job_gpu_info"):
        if (labels["gpu"],) not in divided:
            ranks.setdefault((labels["training_job"], labels["gpu"]), set()).add(labels["rank"])
    shared = Counter(job for (job, _), on_gpu in ranks.items() if len(on_gpu) > 1)
    for job, gpus in shared.items():
        yield Sign(
            alert="DshealthdRanksShareGpu",
            part=job,
            job=job,
            value=float(gpus),
            source="dshealthd_job_gpu_info",
        )


RULES = (variables, transports, placement)
