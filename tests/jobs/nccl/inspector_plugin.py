"""Files as NCCL's Inspector writes them.

The `snprintf` formats of `inspector_prom.cc`, each label and line in its order.

`line` is that of NCCL 2.30.3 to 2.30.7 (format v5.1), `line_229` that of 2.29.3 to 2.29.7.
"""

from __future__ import annotations

import os

UUID = "8c5b0d7e-1a2b-4c3d-9e8f-001122334455"


def file_name(uuid: str = UUID) -> str:
    """Return the name of a GPU's file."""
    return f"nccl_inspector_metrics_{uuid}.prom"


def line(
    bandwidth: float,
    microseconds: float,
    *,
    operation: str = "AllReduce",
    ranks: str = "16",
    nodes: str = "2",
    message: str = "256-257MB",
    job: str = "unknown",
    node: str = "",
    communicator: str = "DP Group 0",
    algorithm: str = "Ring_ll128",
) -> str:
    """Return the two lines of one bucket.

    Send and Recv are of point-to-point metrics, and without an algorithm.
    """
    point = operation in {"Send", "Recv"}
    labels = (
        f'version="v5.1",slurm_job_id="{job}",node="{node or os.uname().nodename}",gpu="GPU0",'
        f'comm_name="{communicator}",'
        f'n_nodes="{nodes}",nranks="{ranks}",'
    )
    if point:
        labels += f'p2p_operation="{operation}",message_size="{message}"'
    else:
        labels += f'collective="{operation}",message_size="{message}",algo_proto="{algorithm}"'
    names = (
        ("p2p_bus_bandwidth_gbs", "p2p_exec_time_microseconds")
        if point
        else ("bus_bandwidth_gbs", "collective_exec_time_microseconds")
    )
    return (
        f"nccl_{names[0]}{{{labels}}} {bandwidth:.6g}\nnccl_{names[1]}{{{labels}}} "
        f"{microseconds:.6g}\n"
    )


def line_229(
    bandwidth: float, microseconds: float, *, message: str = "256.00MB", number: int = 4711
) -> str:
    """Return the three lines of a communicator's last operation."""
    labels = (
        f'comm_id="0x7f8c496ae9f661",hostname="{os.uname().nodename}",rank="3",'
        'slurm_job="train",slurm_job_id="77",nranks="16",n_nodes="2",'
        f'gpu_device_id="GPU3",collective="AllReduce",coll_sn="{number}",'
        f'timestamp="2026-11-21T14:00:00Z",message_size="{message}"'
    )
    return (
        f"nccl_algorithm_bandwidth_gbs{{{labels}}} "
        f"{bandwidth / 1.875:.6g}\nnccl_bus_bandwidth_gbs{{{labels}}} "
        f"{bandwidth:.6g}\n"
        f"nccl_collective_exec_time_microseconds{{{labels}}} {microseconds:.6g}\n"
    )
