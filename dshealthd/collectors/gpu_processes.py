"""Compute processes on every GPU, from NVML, and the ranks of training jobs among them."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dshealthd.core.collector import Context, Fault, Sample, gauge
from dshealthd.jobs.gpu_ranks import GpuRanks
from dshealthd.jobs.shares import MAX_RANKS, share_places
from dshealthd.nvml.collector import GpuCollector

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device, Gpu

PROCESSES = gauge(
    "dshealthd_gpu_compute_processes",
    "Processes with a compute context on the GPU, including its MIG devices.",
    *("gpu", "uuid"),
)
RANK = gauge(
    "dshealthd_job_gpu_info",
    "1 for each rank of a training job with a compute process on the GPU; at most 64 per node.",
    *("training_job", "rank", "gpu", "uuid"),
)
UNKNOWN = gauge(
    "dshealthd_gpu_compute_processes_unknown",
    "Compute processes on this node's GPUs whose environment cannot be read: they may or may "
    "not belong to a training job.",
)


class GpuProcesses(GpuCollector):
    """Reads one list per GPU; then, after all GPUs, the environments of new processes."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self._ranks = GpuRanks(context)
        self._pids: dict[tuple[str, ...], list[int]] = {}

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the compute processes on the GPUs, and the ranks that they belong to."""
        self._pids.clear()
        yield from super().collect()
        ranks, unknown = self._ranks.ranks_of(pid for pids in self._pids.values() for pid in pids)
        yield UNKNOWN(unknown)
        found = {
            (rank.job, rank.launch.rank, labels): (rank.user, rank.job, rank.start)
            for labels, pids in self._pids.items()
            for pid in pids
            if (rank := ranks.get(pid)) is not None
        }
        for (job, number, labels), _ in share_places(found.items(), MAX_RANKS, itemgetter(1)):
            yield RANK(1, job, str(number), *labels)

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the number of a GPU's compute processes."""
        if (pids := device.compute_processes()) is not None:
            self._pids[gpu.labels] = pids
            yield PROCESSES(len(pids), *gpu.labels)
