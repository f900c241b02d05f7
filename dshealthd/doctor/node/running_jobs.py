"""Jobs that run on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, warning
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

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


def _problems(
    context: NodeContext, remedy: str, *, variables: Container[str], problems: Container[str]
) -> Iterator[Result]:
    """Yield results on running jobs' variables that are among these or have one of these
    problems.
    """
    for labels, ranks in context.series("job_environment_problems"):
        variable, problem = labels["variable"], labels["problem"]
        if ranks and (variable in variables or problem in problems):
            meaning = MEANINGS.get(problem, problem.replace("_", " "))
            yield warning(
                f"{variable} of job {labels['training_job']} {meaning} "
                f"({plural(ranks, 'rank')}, first rank "
                f"{labels.get('rank', '?')})",
                remedy=remedy,
                component=f"{labels['training_job']}: {variable}",
            )


def _runs(says: str) -> Callable[[NodeContext], str]:
    """Return a summary that counts the training runs and ends with `says`."""

    def summary(context: NodeContext) -> str:
        runs = len(list(context.series("job_ranks")))
        return f"{plural(runs, 'training run')} on this node; {says}"

    return summary


def _reporting(metric: str, says: str) -> Callable[[NodeContext], str]:
    """Return a summary that counts the jobs that report a metric and ends with `says`."""

    def summary(context: NodeContext) -> str:
        jobs = {point.labels["training_job"] for point in context.series(metric)}
        return f"{plural(len(jobs), 'training job reports', 'training jobs report')} {says}"

    return summary


COLLECTIVES = snapshot_check(
    "nccl-timeout",
    "collectives",
    "No collective is stuck",
    ("nccl_ras",),
    "NCCL RAS reports no stuck communicator in the jobs on this node",
)
JOB_ENDS = snapshot_check(
    "child-failed",
    "job-ends",
    "No rank of a training job has failed",
    ("job_hang",),
    "no rank of a job here has failed within ten minutes",
)
JOB_PORTS = snapshot_check(
    "slow-communication",
    "job-ports",
    "Training jobs use all ports of the fabric",
    ("infiniband",),
    "no job here continues on fewer ports",
    alerts="DshealthdJobOnFewerPorts",
)


def _job_devices_problems(context: NodeContext) -> Iterator[Result]:
    return _problems(
        context,
        "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L  # as many as ranks on this node?",
        variables={"LOCAL_RANK", "CUDA_VISIBLE_DEVICES"},
        problems=(),
    )


JOB_DEVICES = snapshot_check(
    "device-ordinal",
    "job-devices",
    "Ranks of running jobs see their GPUs",
    ("job_environment",),
    _runs("every rank sees the GPU that it requests"),
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
JOB_LOSSES = snapshot_check(
    "loss-nan",
    "job-losses",
    "The loss of each training job is a number",
    ("training",),
    _reporting("job_loss_finite", "a loss; none is NaN or infinite"),
)
JOB_STEPS = snapshot_check(
    "loss-scale-collapse",
    "job-steps",
    "Training jobs do not skip their steps",
    ("training",),
    _reporting("job_loss_scale", "a loss scale; none skips many steps"),
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
    return _problems(
        context,
        "env | grep NCCL_; cat /etc/nccl.conf ~/.nccl.conf  # of the job",
        variables=(),
        problems={"unread", "retired", "renamed"},
    )


JOB_NCCL_SETTINGS = snapshot_check(
    "nccl-environment",
    "job-nccl-settings",
    "NCCL's variables in running jobs fit the node",
    ("job_environment",),
    _runs("none has a wrong NCCL variable"),
    _job_nccl_settings_problems,
)
