"""Compute processes on every GPU, from NVML.

How many, the memory they hold together, and the ranks of training jobs among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.core.collector import gauge
from dshealthd.jobs.gpu_ranks import GpuRanks
from dshealthd.nvml.collector import GpuCollector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Context, Fault, Sample
    from dshealthd.nvml.device import Device, Gpu

PROCESSES = gauge(
    "dshealthd_gpu_compute_processes",
    "Processes with a compute context on the GPU, those of its MIG devices included.",
    "gpu",
    "uuid",
)
MEMORY = gauge(
    "dshealthd_gpu_compute_processes_memory_bytes",
    "GPU memory that these processes hold together; absent if NVML does not tell it of one "
    "of them.",
    *("gpu", "uuid"),
)
RANK = gauge(
    "dshealthd_job_gpu_info",
    "1 for each rank of a training job that has a compute process on the GPU; at most 64 on "
    "a node.",
    *("job", "rank", "gpu", "uuid"),
)
UNKNOWN = gauge(
    "dshealthd_gpu_compute_processes_unknown",
    "Compute processes on this node's GPUs of which it is not known whether a training "
    "job's: their environment cannot be read.",
)

MAX_RANKS = 64


class GpuProcesses(GpuCollector):
    """Reads one list a GPU; then, apart from the GPUs, the environments of processes that are new
    in them.
    """

    def __init__(self, options: Any, context: Context) -> None:
        """Look at nothing yet."""
        super().__init__(options, context)
        self._ranks = GpuRanks(context)
        self._pids: dict[tuple[str, ...], list[int]] = {}

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the compute processes that the GPUs tell, and whose they are."""
        self._pids.clear()
        yield from super().collect()
        ranks, unknown = self._ranks.of(pid for pids in self._pids.values() for pid in pids)
        yield UNKNOWN(unknown)
        found = {
            (ranks[pid], labels)
            for labels, pids in self._pids.items()
            for pid in pids
            if pid in ranks
        }
        for rank, labels in sorted(found)[:MAX_RANKS]:
            yield RANK(1, rank.job, str(rank.number), *labels)

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the count of a GPU's compute processes, and the sum of their memory."""
        processes = device.first(
            ("nvmlDeviceGetComputeRunningProcesses_v3",),
            ("nvmlDeviceGetComputeRunningProcesses_v2",),
        )
        if processes is None:
            return
        self._pids[gpu.labels] = [process.pid for process in processes]
        yield PROCESSES(len(processes), *gpu.labels)
        sizes = [process.usedGpuMemory for process in processes]
        if None not in sizes:
            yield MEMORY(sum(sizes), *gpu.labels)
