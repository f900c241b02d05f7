"""Compute processes on every GPU, from NVML: how many, and the memory they hold together. Never which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collector import gauge
from dshealthd.devices.collector import GpuCollector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.collector import Sample
    from dshealthd.devices.device import Device, Gpu

PROCESSES = gauge(
    "dshealthd_gpu_compute_processes", "Processes with a compute context on the GPU, those of its MIG devices included.", "gpu", "uuid"
)
MEMORY = gauge(
    "dshealthd_gpu_compute_processes_memory_bytes",
    "GPU memory that these processes hold together; absent if NVML does not tell it of one of them.",
    *("gpu", "uuid"),
)


class GpuProcesses(GpuCollector):
    """Reads one list a GPU."""

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the count and the sum."""
        processes = device.first(("nvmlDeviceGetComputeRunningProcesses_v3",), ("nvmlDeviceGetComputeRunningProcesses_v2",))
        if processes is None:
            return
        yield PROCESSES(len(processes), *gpu.labels)
        sizes = [process.usedGpuMemory for process in processes]
        if None not in sizes:
            yield MEMORY(sum(sizes), *gpu.labels)
