"""Compute processes of GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.collectors.gpu_processes import RANK, GpuProcesses
from dshealthd.core.collector import Reason, Sample, process_part
from dshealthd.nvml.collector import GpuCollector
from tests.collectors.bench import Bench, child, values
from tests.jobs.machines import TORCH, Machine
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
        with child("", env=job) as rank:
            for gpu in (0, 2):
                node.simulator.set(gpu, "processes", f"{rank}:1048576, {os.getpid()}:1048576")
            seen = node.collect("gpu_processes")
            again = node.collect("gpu_processes")
        after = node.collect("gpu_processes")
    assert seen.values("job_gpu_info") == {
        ("slurm-77", "5", gpu, node.uuid(int(gpu))): 1 for gpu in ("0", "2")
    }
    assert seen.value("gpu_compute_processes_unknown") == 0
    assert again.values("job_gpu_info") == seen.values("job_gpu_info")
    assert not [part for part in again.approached if f"process {rank}" in part], "it is read once"
    assert after.values("job_gpu_info") == {}
    assert after.value("gpu_compute_processes_unknown") == 0


def test_ranks_that_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them, in turns of users and of their jobs."""
    machine = Machine(tmp_path / "proc")
    for rank in range(65):
        machine.process(100 + rank, {**TORCH, "RANK": str(rank), "SLURM_JOB_ID": "1"})
    machine.process(200, {**TORCH, "RANK": "0", "SLURM_JOB_ID": "2"})

    def listed(collector: GpuProcesses) -> Iterator[Sample]:
        collector._pids["0", "GPU-0"] = [*range(100, 165), 200]
        yield from ()

    monkeypatch.setattr(GpuCollector, "collect", listed)
    found = values(Bench("gpu_processes", tmp_path).collect(), RANK)
    assert len(found) == 64
    assert ("slurm-2", "0", "0", "GPU-0") in found


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
