"""MIG devices, from NVML: the partitions of a GPU, and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.collector import gauge
from dshealthd.nvml.collector import GpuCollector
from dshealthd.nvml.values import MAX_MIG_DEVICES, number, told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Sample
    from dshealthd.nvml.device import Device, Gpu

_ID = ("gpu", "uuid", "mig_uuid")
INFO = gauge(
    "dshealthd_mig_device_info",
    "1; identity of a MIG device: its GPU instance, and its profile such as 1g.10gb.",
    *_ID,
    "gpu_instance",
    "profile",
)
USED = gauge("dshealthd_mig_memory_used_bytes", "Memory in use on the MIG device.", *_ID)
TOTAL = gauge("dshealthd_mig_memory_total_bytes", "Memory of the MIG device.", *_ID)

_MOST = "nvmlDeviceGetMaxMigDeviceCount"


class Mig(GpuCollector):
    """Reads the MIG devices of GPUs in MIG mode; of the others, only the mode."""

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the MIG devices; their order and number may change between sweeps."""
        current, _ = device.ask("nvmlDeviceGetMigMode") or (0, 0)
        if current != 1:
            return
        most = device.once(_MOST)
        for index in range(device.count(_MOST, most, MAX_MIG_DEVICES) or 0):
            handle = device.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is None:
                continue
            part = device.of(handle)
            labels = (*gpu.labels, part.ask("nvmlDeviceGetUUID") or "")
            instance = part.ask("nvmlDeviceGetGpuInstanceId")
            _, _, profile = (part.ask("nvmlDeviceGetName") or "").partition(" MIG ")
            yield INFO(1, *labels, "" if instance is None else str(instance), profile)
            memory = part.first(
                ("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"), ("nvmlDeviceGetMemoryInfo",)
            )
            if memory is not None:
                yield from told(USED, number(memory.used), *labels)
                yield from told(TOTAL, number(memory.total), *labels)
