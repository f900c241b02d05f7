"""The checks that show findings, and what is known of the same parts beside them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING

from dshealthd.collectors.rendezvous import parse_ports
from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, unknown, warning
from dshealthd.doctor.node import kernel_log
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.linux.local_network import local_ports
from dshealthd.probe.observation import Outcome as Ended

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext

MEANINGS = {
    "beyond": "is not below the number of ranks or of visible GPUs",
    "repeated": "lists a GPU twice, so CUDA shows none",
    "absent": "names a device that this node does not have",
    "down": "names a device that is down",
    "loopback": "leaves a multi-node job only an interface inside the node",
    "out_of_range": "has a value out of range",
    "no_number": "has a value that is not a number to its reader",
    "misspelt": "seems to be misspelt: a similar variable is set that nothing reads",
    "unread": "is not read by any release in use",
    "retired": "is no longer read",
    "renamed": "has been renamed",
    "differs": "differs between the ranks of this node",
    "exposed": "opens a port without authentication to other hosts",
}
"""What is wrong with a variable of a job, by the label `problem`."""
_TELL_NOTHING = frozenset(
    {
        Ended.DECLINED,
        Ended.INCONCLUSIVE,
        Ended.UNREACHABLE,
        Ended.UNAUTHORIZED,
    }
)
_NO_GPU = "gpu_up", "no GPU"
_NO_PROBES = "probe_up", "no probes are configured"
_NO_JOB = "job_ranks", "no training job is on this node"


def _no_nvml(context: NodeContext) -> Iterator[Result]:
    expected = context.series.value("gpus_expected")
    if expected and context.series.value("gpus_visible") is None:
        yield unknown(
            f"{plural(expected, 'NVIDIA GPU')} on the PCI bus, but no NVML to query them",
            remedy="nvidia-smi; dmesg | grep -i nvrm",
        )


def _reported(what: str, remedy: str, metric: str) -> Callable[[NodeContext], Iterator[Result]]:
    """Return problems: each GPU that has no sample of a metric."""

    def problems(context: NodeContext) -> Iterator[Result]:
        series = context.series
        silent = [
            gpu for (gpu,) in series.parts("gpu_up", "gpu") if not series.has(metric, gpu=gpu)
        ]
        for gpu in sorted(silent):
            yield unknown(
                f"GPU {gpu} does not report {what}",
                remedy=f"nvidia-smi -i {gpu} {remedy}",
                component=f"gpu {gpu}",
            )

    return problems


def _unless_probed(context: NodeContext) -> Iterator[Result]:
    """Yield an unknown result where probes run but no round says anything yet."""
    telling = any(
        point.value and point.labels["outcome"] not in _TELL_NOTHING
        for point in context.series("probe_rounds_total")
    )
    if context.series.value("probe_up") is not None and not telling:
        yield unknown(
            "probes are configured, but no round with another node has had a result yet",
            remedy="dshealthd metrics | grep dshealthd_probe_rounds_total",
        )


def _unowned(context: NodeContext) -> Iterator[Result]:
    unowned = context.series.value("rendezvous_listeners", orphaned="unknown")
    if unowned:
        first, last = parse_ports(getattr(context.config.collectors["rendezvous"], "ports", ""))
        yield unknown(
            f"the owner of {plural(unowned, 'listener')} on rendezvous ports is unknown: it was "
            "not found in time, belongs to another user, or is in a container",
            remedy=f"sudo ss -ltnp 'sport >= :{first} and sport <= :{last}'",
            value=f"{unowned:g}",
            limit="0",
            source="dshealthd_rendezvous_listeners",
        )


def _ephemeral(context: NodeContext) -> Iterator[Result]:
    """Yield an overlap of ranges: a connection may hold the port that a job needs to bind."""
    first, last = parse_ports(getattr(context.config.collectors["rendezvous"], "ports", ""))
    assigned = local_ports(context.host)
    free = [port for port in range(first, last + 1) if port in assigned]
    if free:
        yield warning(
            f"rendezvous ports {free[0]}-{free[-1]} are inside the ephemeral range {assigned}: an "
            "outgoing connection can hold one that a job needs to bind",
            remedy=f"sudo {assigned.reserving(free[0], free[-1])}",
            value=f"{free[0]}-{free[-1]}",
            limit=f"outside of {assigned}",
            source="net.ipv4.ip_local_port_range",
            component=f"ports {free[0]}-{free[-1]}",
        )


def _of_environment(
    remedy: str, *, variables: Container[str] = (), problems: Container[str] = ()
) -> Callable[[NodeContext], Iterator[Result]]:
    """Return problems: variables of jobs that are among these, or have one of these problems."""

    def found(context: NodeContext) -> Iterator[Result]:
        for labels, ranks in context.series("job_environment_problems"):
            variable, problem = labels["variable"], labels["problem"]
            if ranks and (variable in variables or problem in problems):
                meaning = MEANINGS.get(problem, problem.replace("_", " "))
                yield warning(
                    f"{variable} of job {labels['training_job']} {meaning} "
                    f"({plural(ranks, 'rank')}, first rank {labels.get('rank', '?')})",
                    remedy=remedy,
                    component=f"{labels['training_job']}: {variable}",
                )

    return found


def _broken_configuration(context: NodeContext) -> Iterator[Result]:
    """Yield the errors of the installed file, unless the agent has found it refused already."""
    if not any(one.part == "configuration" for one in context.findings["findings"]):
        for error in context.broken:
            yield warning(
                f"the agent does not start with {error}",
                remedy="correct the file until `dshealthd check-config` accepts it",
                component="configuration",
            )


CHECKS = (
    snapshot_check(
        "collector-failing",
        "agent",
        "No worker of the agent is stuck, and it runs with its current files",
        problems=_broken_configuration,
    ),
    snapshot_check("maintenance", "maintenance", "This node is not in maintenance"),
    snapshot_check(
        "gpu-lost",
        "gpus",
        "Every GPU responds",
        *("gpu_bus", "gpu", "mig"),
        absent=_NO_GPU,
        problems=_no_nvml,
    ),
    snapshot_check(
        "nccl-all-reduce-failed",
        "gpu-memory",
        "No GPU has an uncorrected error, a pending remap or a recent Xid",
        *("ecc", "kernel_log"),
        absent=_NO_GPU,
    ),
    snapshot_check(
        "bad-link",
        "infiniband",
        "InfiniBand ports are up at their peers' rate",
        "infiniband",
        alerts=("DshealthdFabricPort", "DshealthdAdapter", "DshealthdNetwork"),
        absent=("infiniband_port_up", "no InfiniBand"),
    ),
    snapshot_check(
        "gpu-metrics-gone", "gpu-metrics", "All GPUs that may be used here are monitored", "gpu_bus"
    ),
    snapshot_check(
        "gpu-throttled",
        "gpu-throttling",
        "GPUs are neither hot nor throttled",
        "gpu",
        absent=_NO_GPU,
        problems=_reported(
            "whether it is throttled", "-q -d PERFORMANCE,TEMPERATURE", "gpu_throttle_active"
        ),
    ),
    snapshot_check(
        "bad-link",
        "imex",
        "GPUs are in their NVLink fabric and domain, and IMEX runs where it is configured",
        "nvlink_domain",
        alerts="DshealthdNvlinkFabric",
        absent=("imex_nodes", "the GPUs are not part of a multi-node NVLink fabric"),
    ),
    snapshot_check(
        "bad-link",
        "fabric-manager",
        "Fabric Manager runs on nodes with NVSwitches",
        "nvlink_domain",
        alerts="DshealthdFabricManager",
        absent=("fabric_manager_running", "no NVSwitch is managed by this node"),
    ),
    snapshot_check(
        "bad-link",
        "nvlink",
        "NVLinks are up",
        *("nvlink", "nvlink_domain"),
        alerts=("DshealthdNvlinkDown", "DshealthdNvlinkDegraded", "DshealthdNvlinkDomain"),
        absent=("nvlinks_up", "no NVLink"),
    ),
    snapshot_check("nvml-broken", "nvml", "NVML responds", "gpu", "gpu_processes", absent=_NO_GPU),
    snapshot_check(
        "cpu-offload-slow",
        "pcie",
        "PCIe links have their full width",
        "pcie",
        absent=("pcie_link_width_max", "a virtual machine does not see how wide its slots are"),
        problems=_reported(
            "its PCIe link width", "-q | grep -A 8 'GPU Link Info'", "pcie_link_width"
        ),
    ),
    snapshot_check(
        "slow-communication",
        "gpu-direct",
        "Adapters reach GPU memory directly",
        *("software", "infiniband"),
        alerts="DshealthdGpuDirectOff",
        absent=("gpu_direct_peer_memory", "no GPUs with RDMA adapters of NVIDIA"),
    ),
    snapshot_check(
        "bad-link",
        "link-suspects",
        "No probe suspects a link of this node",
        alerts="DshealthdLink",
        absent=_NO_PROBES,
        problems=_unless_probed,
    ),
    snapshot_check(
        "nccl-remote-error",
        "probe-failures",
        "Probes reach the other nodes",
        absent=_NO_PROBES,
        problems=_unless_probed,
    ),
    snapshot_check("probes-missing", "probe-rounds", "Probes run", absent=_NO_PROBES),
    snapshot_check(
        "straggler",
        "straggler",
        "This node is as fast as its peers in probes",
        absent=_NO_PROBES,
        problems=_unless_probed,
    ),
    snapshot_check(
        "host-errors",
        "host-errors",
        "The kernel log has no error of the host's memory, processor, kernel or GPU driver",
        "kernel_log",
        problems=kernel_log.last_hour,
    ),
    snapshot_check("clock-unsynchronized", "clock", "The clock is synchronized", "clock"),
    snapshot_check("disk-full", "disk-space", "File systems have free space", "filesystem"),
    snapshot_check(
        "host-memory-pressure",
        "host-memory",
        "The host has free memory",
        *("memory", "pressure"),
    ),
    snapshot_check(
        "loopback-refused", "loopback", "TCP works on the loopback interface", "loopback"
    ),
    snapshot_check(
        "open-files",
        "open-files",
        "Open files, threads, requests and sockets are below their limits",
        *("open_files", "kernel", "tcp", "tcp_limits"),
    ),
    snapshot_check(
        "checkpoint-path", "paths", "Configured paths respond and are writable", "filesystem"
    ),
    snapshot_check("shared-memory", "shared-memory", "Shared memory is large enough", "filesystem"),
    snapshot_check(
        "nccl-known-bad",
        "nccl-releases",
        "No NCCL release with a known defect is in use",
        "software",
    ),
    snapshot_check(
        "address-in-use",
        "listeners",
        "No orphan holds a rendezvous port",
        "rendezvous",
        problems=_unowned,
    ),
    snapshot_check(
        "time-wait",
        "ports",
        "Ports are free, and rendezvous ports are not ephemeral",
        *("tcp", "tcp_limits", "rendezvous"),
        problems=_ephemeral,
    ),
    snapshot_check(
        "ranks-stuck-at-init",
        "job-rendezvous",
        "Ranks of training jobs meet",
        *("rendezvous", "job_environment", "nccl_ras"),
    ),
    snapshot_check("nccl-timeout", "collectives", "No collective is stuck", "nccl_ras"),
    snapshot_check(
        "child-failed", "job-ends", "No rank of a training job has failed lately", "job_hang"
    ),
    snapshot_check(
        "job-not-followed",
        "job-heartbeats",
        "Training jobs are followed, where the site asks for it",
        "job_environment",
    ),
    snapshot_check(
        "gpus-unused",
        "job-gpus",
        "Training jobs use the GPUs that they hold",
        *("job_environment", "gpu_processes"),
    ),
    snapshot_check(
        "device-ordinal",
        "job-devices",
        "Ranks of running jobs see their GPUs",
        "job_environment",
        absent=_NO_JOB,
        problems=_of_environment(
            "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L  # as many as ranks on this node?",
            variables={"LOCAL_RANK", "CUDA_VISIBLE_DEVICES"},
        ),
    ),
    snapshot_check(
        "training-hang",
        "job-hangs",
        "No training job on this node is hung",
        *("training", "job_hang"),
    ),
    snapshot_check(
        "loss-nan",
        "job-losses",
        "The loss of each training job is a number",
        "training",
        absent=("job_loss_finite", "no training job reports a loss"),
    ),
    snapshot_check(
        "loss-scale-collapse",
        "job-steps",
        "Training jobs do not skip their steps",
        "training",
        absent=("job_loss_scale", "no training job reports a loss scale"),
    ),
    snapshot_check(
        "training-slow",
        "job-cpus",
        "GPUs do not wait for overloaded CPUs",
        *("gpu", "gpu_processes", "pressure"),
        absent=_NO_GPU,
    ),
    # Variables that nothing reads harm no job. All others are findings.
    snapshot_check(
        "nccl-environment",
        "job-nccl-settings",
        "NCCL's variables in running jobs fit the node",
        "job_environment",
        absent=_NO_JOB,
        problems=_of_environment(
            "env | grep NCCL_; cat /etc/nccl.conf ~/.nccl.conf  # of the job",
            problems={"unread", "retired", "renamed"},
        ),
    ),
)
