"""How busy the units of each GPU are, from NVML's performance monitoring (GPM); off by default.

NVLink and PCIe traffic, which GPM tells as well, is counted by the collectors `nvlink` and `pcie`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import gauge
from dshealthd.core.options import option
from dshealthd.nvml.collector import GpuCollector, SlowGpuCollectorOptions
from dshealthd.nvml.values import told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Context, Sample
    from dshealthd.nvml.device import Device, Gpu
    from dshealthd.nvml.gpm import Samples

_ID = ("gpu", "uuid")
_SINCE = "average since the sample before; GPM, Hopper and later."
SM_ACTIVE = gauge(
    "dshealthd_gpu_sm_active_ratio", f"Multiprocessors that had any work, {_SINCE}", *_ID
)
SM_OCCUPANCY = gauge(
    "dshealthd_gpu_sm_occupancy_ratio",
    f"Warps in flight, of as many as the multiprocessors can hold, {_SINCE}",
    *_ID,
)
TENSOR_ACTIVE = gauge(
    "dshealthd_gpu_tensor_active_ratio", f"Time in which tensor cores were at work, {_SINCE}", *_ID
)
MEMORY_ACTIVE = gauge(
    "dshealthd_gpu_memory_bandwidth_ratio",
    f"Bandwidth of the GPU's memory in use, of the highest possible, {_SINCE}",
    *_ID,
)
_METRICS = {
    "NVML_GPM_METRIC_SM_UTIL": SM_ACTIVE,
    "NVML_GPM_METRIC_SM_OCCUPANCY": SM_OCCUPANCY,
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL": TENSOR_ACTIVE,
    "NVML_GPM_METRIC_DRAM_BW_UTIL": MEMORY_ACTIVE,
}


@dataclass(frozen=True, kw_only=True)
class GpmOptions(SlowGpuCollectorOptions):
    """Options of this collector."""

    enabled: bool = option(
        False,
        "Whether this collector runs. It uses the GPU's performance counters, which profilers and "
        "DCGM use too, and what they do to one another was not tried on a GPU.",
    )


class Gpm(GpuCollector):
    """Keeps two samples of each GPU, and takes them in turn."""

    Options = GpmOptions

    def __init__(self, options: GpmOptions, context: Context) -> None:
        """Have no sample yet."""
        super().__init__(options, context)
        self._samples: dict[str, Samples] = {}

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield GPM's averages since the last sweep; nothing in the first, or before Hopper."""
        from dshealthd.nvml.gpm import Samples  # loads pynvml, which has no place in the agent

        samples = self._samples.setdefault(gpu.uuid, Samples())
        averages = samples.between(device, tuple(_METRICS)) or [None] * len(_METRICS)
        for metric, percent in zip(_METRICS.values(), averages, strict=True):
            yield from told(metric, percent, *gpu.labels, scale=1e-2)
