"""GPU memory errors from NVML: ECC counts, their location, and memory retired for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.collector import Metric, News, Sample
from dshealthd.nvml.collector import GpuCollector
from dshealthd.nvml.values import Fields, gpu_counter, gpu_gauge, number, told

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device, Gpu

_COUNTERS = (
    "the volatile counter starts when the driver loads, the aggregate one covers the GPU's lifetime"
)
ERRORS = gpu_counter(
    "dshealthd_gpu_ecc_errors_total",
    f"ECC errors of the whole GPU; {_COUNTERS}. Absent while ECC is off.",
    *("type", "counter"),
)
LOCATED = gpu_counter(
    "dshealthd_gpu_ecc_location_errors_total",
    f"ECC errors by location: sram and dram, or each cache on older GPUs; {_COUNTERS}.",
    *("location", "type", "counter"),
)
THRESHOLD = gpu_gauge(
    "dshealthd_gpu_sram_threshold_exceeded",
    "1 once uncorrectable SRAM errors exceed NVIDIA's threshold for replacing the GPU.",
)
ROWS = gpu_gauge(
    "dshealthd_gpu_remapped_rows",
    "Memory rows remapped to spare rows, by the type of error that caused it; Ampere and later.",
    "type",
)
ROWS_PENDING = gpu_gauge(
    "dshealthd_gpu_remapped_rows_pending",
    "1 while a row is waiting for the next GPU reset to be remapped.",
)
ROWS_FAILED = gpu_gauge(
    "dshealthd_gpu_remapped_rows_failed",
    "1 once a row could not be remapped because no spare is left: replace the GPU.",
)
REPAIR_PENDING = gpu_gauge(
    "dshealthd_gpu_repair_pending",
    "1 while a memory bank, a memory channel or a TPC is waiting for the next GPU reset to be "
    "repaired; Hopper and later, with recent drivers.",
)
UNREPAIRABLE = gpu_gauge(
    "dshealthd_gpu_memory_unrepairable",
    "1 once the driver reports that the GPU's memory cannot be repaired: replace the GPU. Recent "
    "drivers only.",
)
INFOROM = gpu_gauge(
    "dshealthd_gpu_inforom_valid",
    "1 if the GPU's infoROM, which stores its remapped rows and error counts, is usable, 0 if it "
    "is corrupted; nvmlDeviceGetInforomConfigurationChecksum, once a minute.",
)
PAGES = gpu_gauge(
    "dshealthd_gpu_retired_pages",
    "Retired memory pages, by the type of error that caused it; before Ampere.",
    "type",
)
PAGES_PENDING = gpu_gauge(
    "dshealthd_gpu_retired_pages_pending",
    "1 while a page is waiting for the next GPU reset to be retired.",
)

_TYPES = {"corrected": "SBE", "uncorrected": "DBE"}
_SPANS = {"volatile": "VOL", "aggregate": "AGG"}
_PLACES = {
    "total": "TOTAL",
    "dram": "DEV",
    "l1": "L1",
    "l2": "L2",
    "register": "REG",
    "texture": "TEX",
}
_COUNTS = {
    (place, kind, span): f"NVML_FI_DEV_ECC_{letters}_{when}_{where}"
    for place, where in _PLACES.items()
    for kind, letters in _TYPES.items()
    for span, when in _SPANS.items()
} | {
    ("cbu", "uncorrected", span): f"NVML_FI_DEV_ECC_DBE_{when}_CBU" for span, when in _SPANS.items()
}
_REST: tuple[tuple[str, Metric, tuple[str, ...]], ...] = (
    ("NVML_FI_DEV_REMAPPED_COR", ROWS, ("corrected",)),
    ("NVML_FI_DEV_REMAPPED_UNC", ROWS, ("uncorrected",)),
    ("NVML_FI_DEV_REMAPPED_PENDING", ROWS_PENDING, ()),
    ("NVML_FI_DEV_REMAPPED_FAILURE", ROWS_FAILED, ()),
    ("NVML_FI_DEV_RETIRED_SBE", PAGES, ("corrected",)),
    ("NVML_FI_DEV_RETIRED_DBE", PAGES, ("uncorrected",)),
    ("NVML_FI_DEV_RETIRED_PENDING", PAGES_PENDING, ()),
)
_BANKS = "NVML_FI_DEV_PENDING_BANK_REMAPPING"
"""From driver 615 on. NVIDIA names no consequence of inactive rows and banks: not read."""
_ASKED = Fields(*_COUNTS.values(), *(field for field, _, _ in _REST), _BANKS)


class Ecc(GpuCollector):
    """Reads most counts in one call, and SRAM counts in another."""

    wakes_on = frozenset({News.GPU_ERROR, News.GPU_MEMORY})

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the memory errors that the GPU counts; which ones depends on its generation."""
        values = device.fields(_ASKED)
        for (place, kind, span), value in zip(_COUNTS, values, strict=False):
            if place == "total":
                yield from told(ERRORS, value, *gpu.labels, kind, span)
            else:
                yield from told(LOCATED, value, *gpu.labels, place, kind, span)
        *rest, banks = values[len(_COUNTS) :]
        for (_, metric, labels), value in zip(_REST, rest, strict=True):
            yield from told(metric, value, *gpu.labels, *labels)
        pending: list[float | None] = [
            *map(number, device.query("nvmlDeviceGetRepairStatus") or ()),
            *(() if banks is None else (banks,)),
        ]
        if pending and None not in pending:
            yield REPAIR_PENDING(float(any(pending)), *gpu.labels)
        broken = device.query("nvmlDeviceGetUnrepairableMemoryFlag_v1")
        yield from told(UNREPAIRABLE, None if broken is None else float(broken > 0), *gpu.labels)
        inforom = device.keep(("inforom",), device.inforom_valid)
        yield from told(INFOROM, None if inforom is None else float(inforom), *gpu.labels)
        sram = device.fill("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t")
        if sram is not None:
            for span in _SPANS:
                corrected, *uncorrected = (
                    getattr(sram, f"{span}{count}") for count in ("Cor", "UncParity", "UncSecDed")
                )
                yield from _sram(gpu, ("corrected", span), corrected)
                yield from _sram(gpu, ("uncorrected", span), *uncorrected)
            yield from told(THRESHOLD, number(sram.bThresholdExceeded), *gpu.labels)
            return
        for kind in _TYPES:
            for span in _SPANS:
                constants = (
                    f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}",
                    f"NVML_{span.upper()}_ECC",
                    "NVML_MEMORY_LOCATION_SRAM",
                )
                yield from told(
                    LOCATED,
                    device.query("nvmlDeviceGetMemoryErrorCounter", *constants),
                    *gpu.labels,
                    "sram",
                    kind,
                    span,
                )


def _sram(gpu: Gpu, labels: tuple[str, str], *counts: int) -> Iterator[Sample]:
    """Yield the sum of SRAM ECC counts, if all are known."""
    if all(number(count) is not None for count in counts):
        yield LOCATED(sum(counts), *gpu.labels, "sram", *labels)
