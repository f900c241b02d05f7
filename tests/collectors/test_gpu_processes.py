"""Compute processes of GPUs: a count and a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.devices.node import Node

if TYPE_CHECKING:
    from pathlib import Path


def test_count_and_sum(tmp_path: Path) -> None:
    """Processes are counted and their memory is summed, with no label that tells which they are."""
    with Node(tmp_path, gpus=3) as node:
        node.simulator.set(1, "processes", "4711:1048576, 4712:2097152")
        node.simulator.set(2, "processes", "4711:1048576, 4713:na")
        seen = node.collect("gpu_processes")
    assert {labels[0]: value for labels, value in seen.values("gpu_compute_processes").items()} == {"0": 0, "1": 2, "2": 2}
    memory = {labels[0]: value for labels, value in seen.values("gpu_compute_processes_memory_bytes").items()}
    assert memory == {"0": 0, "1": 3145728}
    assert {sample.metric.labels for sample in seen.results["gpu_processes"].samples} == {("gpu", "uuid")}


def test_older_drivers(tmp_path: Path) -> None:
    """Where the driver lacks the newest version of the call, the one before it is used."""
    with Node(tmp_path, gpus=1) as node:
        node.simulator.set(0, "processes", "4711:1048576")
        node.simulator.fault("fail", 13, function="nvmlDeviceGetComputeRunningProcesses_v3")
        seen = node.collect("gpu_processes")
    assert seen.value("gpu_compute_processes") == 1
