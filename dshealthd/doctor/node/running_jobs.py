"""Jobs that run on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, warning
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.doctor.node_context import NodeContext


MEANINGS = {
    "beyond": "is not below the number of ranks or of visible GPUs",
    "repeated": "lists a GPU twice, so CUDA shows none",
    "absent": "names a device that this node does not have",
    "down": "names a device that is down",
    "loopback": "leaves a multi-node job only the loopback interface",
    "out_of_range": "has a value out of range",
    "no_number": "has a value that is not a number to its reader",
    "misspelt": "seems to be misspelt: a similar variable is set that nothing reads",
    "unread": "is not read by any release in use",
    "retired": "is no longer read",
    "renamed": "has been renamed",
    "differs": "differs between the ranks of this node",
    "exposed": "opens a port without authentication to other hosts",
}


def problems(
    context: NodeContext, wanted: Callable[[str, str], bool], remedy: str
) -> Iterator[Result]:
    """Yield results on running jobs' variables for which `wanted(variable, problem)` holds."""
    for labels, ranks in context.series("job_environment_problems"):
        variable, problem = labels["variable"], labels["problem"]
        if ranks and wanted(variable, problem):
            meaning = MEANINGS.get(problem, problem.replace("_", " "))
            yield warning(
                f"{variable} of job {labels['training_job']} {meaning} ({plural(ranks, 'rank')}, first rank "
                f"{labels.get('rank', '?')})",
                remedy=remedy,
                component=f"{labels['training_job']}: {variable}",
            )


def _collectives(_context: NodeContext) -> str:
    return "NCCL RAS reports no stuck communicator in the jobs on this node"


COLLECTIVES = snapshot_check(
    "nccl-timeout",
    "collectives",
    "No collective is stuck",
    ("nccl_ras",),
    _collectives,
)


def _arrivals(_context: NodeContext) -> str:
    return "NCCL RAS reports no job here whose ranks wait for others to arrive"


ARRIVALS = snapshot_check(
    "ranks-stuck-at-init",
    "job-arrivals",
    "All ranks of training jobs arrive",
    ("nccl_ras",),
    _arrivals,
)


def _job_ends(_context: NodeContext) -> str:
    return "no rank of a job here has failed within ten minutes"


JOB_ENDS = snapshot_check(
    "child-failed",
    "job-ends",
    "No rank of a training job has failed",
    ("job_hang",),
    _job_ends,
)


def _job_ports(_context: NodeContext) -> str:
    return "no job here continues on fewer ports"


JOB_PORTS = snapshot_check(
    "slow-communication",
    "job-ports",
    "Training jobs use all ports of the fabric",
    ("infiniband",),
    _job_ports,
)


def _job_devices_problems(context: NodeContext) -> Iterator[Result]:
    yield from problems(
        context,
        lambda variable, _problem: variable in {"LOCAL_RANK", "CUDA_VISIBLE_DEVICES"},
        "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L  # as many as ranks on this node?",
    )


def _job_devices(context: NodeContext) -> str:
    runs = len(list(context.series("job_ranks")))
    return f"{plural(runs, 'training run')} on this node; every rank sees the GPU that it requests"


JOB_DEVICES = snapshot_check(
    "device-ordinal",
    "job-devices",
    "Ranks of running jobs see their GPUs",
    ("job_environment",),
    _job_devices,
    _job_devices_problems,
)


def _job_hangs(context: NodeContext) -> str:
    jobs = {point.labels["training_job"] for point in context.series("job_ranks")}
    return f"{plural(len(jobs), 'training job')} here, none hung"


JOB_HANGS = snapshot_check(
    "training-hang",
    "job-hangs",
    "No training job on this node is hung",
    ("training", "job_hang"),
    _job_hangs,
)


def _job_losses(context: NodeContext) -> str:
    jobs = {point.labels["training_job"] for point in context.series("job_loss_finite")}
    report = plural(len(jobs), "training job reports", "training jobs report")
    return f"{report} a loss; none is NaN or infinite"


JOB_LOSSES = snapshot_check(
    "loss-nan",
    "job-losses",
    "The loss of each training job is a number",
    ("training",),
    _job_losses,
)


def _job_steps(context: NodeContext) -> str:
    jobs = {point.labels["training_job"] for point in context.series("job_loss_scale")}
    report = plural(len(jobs), "training job reports", "training jobs report")
    return f"{report} a loss scale; none skips many steps"


JOB_STEPS = snapshot_check(
    "loss-scale-collapse",
    "job-steps",
    "Training jobs do not skip their steps",
    ("training",),
    _job_steps,
)


def _job_cpus(context: NodeContext) -> str:
    used = len(list(context.series("gpu_compute_processes")))
    return f"no sign that the CPUs delay the GPUs ({plural(used, 'GPU')} in use)"


JOB_CPUS = snapshot_check(
    "training-slow",
    "job-cpus",
    "GPUs do not wait for overloaded CPUs",
    ("gpu", "gpu_processes", "pressure"),
    _job_cpus,
)


def _job_nccl_settings_problems(context: NodeContext) -> Iterator[Result]:
    """Yield the variables that nothing reads, which harm no job. All others are findings."""
    yield from problems(
        context,
        lambda _variable, problem: problem in {"unread", "retired", "renamed"},
        "env | grep NCCL_; cat /etc/nccl.conf ~/.nccl.conf  # of the job",
    )


def _job_nccl_settings(context: NodeContext) -> str:
    runs = len(list(context.series("job_ranks")))
    return f"{plural(runs, 'training run')} on this node; none has a wrong NCCL variable"


JOB_NCCL_SETTINGS = snapshot_check(
    "nccl-environment",
    "job-nccl-settings",
    "NCCL's variables in running jobs fit the node",
    ("job_environment",),
    _job_nccl_settings,
    _job_nccl_settings_problems,
)


def _job_ranks(context: NodeContext) -> str:
    runs = len(list(context.series("job_ranks")))
    return (
        f"{plural(runs, 'training run')} on this node; no rank is used twice, or on another's GPU"
    )


JOB_RANKS = snapshot_check(
    "rendezvous-env-mismatch",
    "job-ranks",
    "No rank of a running job is used twice",
    ("job_environment",),
    _job_ranks,
)
