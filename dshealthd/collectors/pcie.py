"""PCIe links of GPUs, from NVML: width and generation, their maximum, replays, errors, traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.linux.pci import slot_lanes
from dshealthd.nvml.collector import GpuCollector
from dshealthd.nvml.values import Fields, gpu_counter, gpu_gauge, told

if TYPE_CHECKING:
    from dshealthd.core.collector import Sample
    from dshealthd.nvml.device import Device, Gpu

WIDTH = gpu_gauge("dshealthd_pcie_link_width", "Current lanes of the GPU's PCIe link.")
WIDTH_MAX = gpu_gauge(
    "dshealthd_pcie_link_width_max",
    "Most lanes that the GPU and its slot support; absent in a virtual machine, which does not see "
    "the slot.",
)
GENERATION = gpu_gauge(
    "dshealthd_pcie_link_generation",
    "Current PCIe generation of the link; an idle GPU lowers it to save power.",
)
GENERATION_MAX = gpu_gauge(
    "dshealthd_pcie_link_generation_max",
    "Highest PCIe generation that the GPU and its slot support.",
)
REPLAYS = gpu_counter(
    "dshealthd_pcie_replays_total",
    "Packets retransmitted after an error on the link, since the driver was loaded.",
)
ERRORS = gpu_counter(
    "dshealthd_pcie_errors_total",
    "Errors at the GPU's end of the link, counted by the GPU: correctable, nonfatal, fatal (NVML "
    "fields 173, 179, 180).",
    "type",
)
TRANSMITTED = gpu_counter(
    "dshealthd_pcie_transmit_bytes_total", "Bytes that the GPU sent; wraps around on some GPUs."
)
RECEIVED = gpu_counter(
    "dshealthd_pcie_receive_bytes_total", "Bytes that the GPU received; wraps around on some GPUs."
)
THROUGHPUT = gpu_gauge(
    "dshealthd_pcie_throughput_bytes_per_second",
    "Traffic over the last 20 ms, for GPUs and drivers that do not count bytes.",
    "direction",
)

_ERRORS = {
    "correctable": "NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS",
    "nonfatal": "NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR",
    "fatal": "NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR",
}
_TRAFFIC = (
    "NVML_FI_DEV_PCIE_REPLAY_COUNTER",
    "NVML_FI_DEV_PCIE_COUNT_TX_BYTES",
    "NVML_FI_DEV_PCIE_COUNT_RX_BYTES",
)
_ASKED = Fields(*_TRAFFIC, *_ERRORS.values())
_KIB = 1024
_IN_A_GUEST = frozenset({1, 2})
"""NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH and _VGPU."""


class Pcie(GpuCollector):
    """Reads a few values per GPU; without byte counters NVML measures each direction for 20 ms."""

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield state, replays and traffic of a GPU's PCIe link."""
        replays, sent, received, *errors = device.fields(_ASKED)
        yield from told(WIDTH, device.query("nvmlDeviceGetCurrPcieLinkWidth"), *gpu.labels)
        most = device.keep(("lanes",), lambda: self._most_lanes(device))
        yield from told(WIDTH_MAX, most, *gpu.labels)
        yield from told(
            GENERATION, device.query("nvmlDeviceGetCurrPcieLinkGeneration"), *gpu.labels
        )
        yield from told(
            GENERATION_MAX, device.once("nvmlDeviceGetMaxPcieLinkGeneration"), *gpu.labels
        )
        if replays is None:
            replays = device.query("nvmlDeviceGetPcieReplayCounter")
        yield from told(REPLAYS, replays, *gpu.labels)
        for kind, value in zip(_ERRORS, errors, strict=True):
            yield from told(ERRORS, value, *gpu.labels, kind)
        yield from told(TRANSMITTED, sent, *gpu.labels)
        yield from told(RECEIVED, received, *gpu.labels)
        if sent is None and received is None:
            for direction, constant in (
                ("transmit", "NVML_PCIE_UTIL_TX_BYTES"),
                ("receive", "NVML_PCIE_UTIL_RX_BYTES"),
            ):
                yield from told(
                    THROUGHPUT,
                    device.query("nvmlDeviceGetPcieThroughput", constant),
                    *gpu.labels,
                    direction,
                    scale=_KIB,
                )

    def _most_lanes(self, device: Device) -> int | None:
        """Return the most lanes of a GPU's link, None if its slot is not seen.

        NVML's maximum is the GPU's: an L40S has 16, and 8 of them in its slot at AWS.
        """
        most: int | None = device.once("nvmlDeviceGetMaxPcieLinkWidth")
        if most is None or device.once("nvmlDeviceGetVirtualizationMode") in _IN_A_GUEST:
            return None
        lanes = slot_lanes(self.host, address) if (address := device.address()) else None
        return most if lanes is None else min(most, lanes)
