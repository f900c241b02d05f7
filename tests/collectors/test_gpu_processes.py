"""Compute processes of GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from dshealthd.core.collector import Reason, process_part
from tests.collectors.bench import child
from tests.jobs.machines import TORCH
from tests.nvml.node import Node


def test_older_drivers(tmp_path: Path) -> None:
    """Where the driver lacks the newest version of the call, the one before it is used."""
    with Node(tmp_path, gpus=1) as node:
        node.simulator.set(0, "processes", "4194305:1048576")
        node.simulator.fault("fail", 13, function="nvmlDeviceGetComputeRunningProcesses_v3")
        seen = node.collect("gpu_processes")
    assert seen.value("gpu_compute_processes") == 1


def test_ranks_of_jobs(tmp_path: Path) -> None:
    """A real process of a launcher is told as its rank on its GPUs, until it ends."""
    job = {**os.environ, **TORCH, "RANK": "5", "SLURM_JOB_ID": "77"}
    with Node(tmp_path, gpus=3) as node:
        with child("", env=job) as pid:
            for gpu in (0, 2):
                node.simulator.set(gpu, "processes", f"{pid}:1048576, {os.getpid()}:1048576")
            seen = node.collect("gpu_processes")
            again = node.collect("gpu_processes")
        after = node.collect("gpu_processes")
    assert seen.values("job_gpu_info") == {
        ("slurm-77", "5", gpu, node.uuid(int(gpu))): 1 for gpu in ("0", "2")
    }
    assert seen.value("gpu_compute_processes_unknown") == 0
    assert again.values("job_gpu_info") == seen.values("job_gpu_info")
    assert not [part for part in again.approached if f"process {pid}" in part], (
        "an environment is read once"
    )
    assert after.values("job_gpu_info") == {}
    assert after.value("gpu_compute_processes_unknown") == 0


def test_process_that_hangs(tmp_path: Path) -> None:
    """A process that hung when it was looked at is left out and counted."""
    with Node(tmp_path, gpus=1) as node:
        node.simulator.set(0, "processes", f"{os.getpid()}:1048576")
        seen = node.collect(
            "gpu_processes", blocked={process_part(os.getpid(), os.getuid()): Reason.STUCK}
        )
    assert seen.value("gpu_compute_processes") == 1
    assert seen.value("gpu_compute_processes_unknown") == 1
    assert seen.results["gpu_processes"].faults == ()
