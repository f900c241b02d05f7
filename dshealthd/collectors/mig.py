"""MIG devices, from NVML: the partitions of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.collector import Sample, gauge
from dshealthd.nvml.collector import GpuCollector
from dshealthd.nvml.values import MAX_MIG_DEVICES

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device, Gpu

INFO = gauge(
    "dshealthd_mig_device_info",
    "1; identity of a MIG device: its GPU instance, and its profile such as 1g.10gb.",
    *("gpu", "uuid", "mig_uuid", "gpu_instance", "profile"),
)

_MOST = "nvmlDeviceGetMaxMigDeviceCount"


class Mig(GpuCollector):
    """Reads the MIG devices of GPUs in MIG mode; of the others, only the mode."""

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the MIG devices of a GPU; their order and number may change between sweeps."""
        current, _ = device.query("nvmlDeviceGetMigMode") or (0, 0)
        if current != 1:
            return
        most = device.once(_MOST)
        for index in range(device.count(_MOST, most, MAX_MIG_DEVICES) or 0):
            handle = device.query("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is None:
                continue
            part = device.of(handle)
            labels = (*gpu.labels, part.query("nvmlDeviceGetUUID") or "")
            instance = part.query("nvmlDeviceGetGpuInstanceId")
            _, _, profile = (part.query("nvmlDeviceGetName") or "").partition(" MIG ")
            yield INFO(1, *labels, "" if instance is None else str(instance), profile)
