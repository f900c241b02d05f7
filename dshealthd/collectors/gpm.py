"""Utilization of each GPU's units, from NVML's performance monitoring (GPM); off by default.

GPM also has NVLink and PCIe traffic; the collectors `nvlink` and `pcie` count that.
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
_SINCE = "average since the previous sample; GPM, Hopper and later."
SM_ACTIVE = gauge(
    "dshealthd_gpu_sm_active_ratio", f"Share of multiprocessors with any work, {_SINCE}", *_ID
)
SM_OCCUPANCY = gauge(
    "dshealthd_gpu_sm_occupancy_ratio",
    f"Warps in flight as a share of those that the multiprocessors can hold, {_SINCE}",
    *_ID,
)
TENSOR_ACTIVE = gauge(
    "dshealthd_gpu_tensor_active_ratio",
    f"Share of time in which tensor cores were active, {_SINCE}",
    *_ID,
)
MEMORY_ACTIVE = gauge(
    "dshealthd_gpu_memory_bandwidth_ratio",
    f"Memory bandwidth in use as a share of the maximum, {_SINCE}",
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
        "Whether this collector runs. It uses the GPU's performance counters, as profilers and "
        "DCGM do; how they affect one another has not been tested on a GPU.",
    )


class Gpm(GpuCollector):
    """Keeps two samples of each GPU, and takes them alternately."""

    Options = GpmOptions

    def __init__(self, options: GpmOptions, context: Context) -> None:
        super().__init__(options, context)
        self._samples: dict[str, Samples] = {}

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield GPM's averages since the last sweep; nothing in the first one or before Hopper."""
        from dshealthd.nvml.gpm import Samples  # loads pynvml, which must stay out of the agent

        samples = self._samples.setdefault(gpu.uuid, Samples())
        averages = samples.between(device, tuple(_METRICS)) or [None] * len(_METRICS)
        for metric, percent in zip(_METRICS.values(), averages, strict=True):
            yield from told(metric, percent, *gpu.labels, scale=1e-2)
