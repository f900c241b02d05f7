"""The same readings by plain pynvml, as a script would take them.

`python -m bench.raw_nvml ROUNDS COLLECTOR …` prints CPU ms a sweep.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import pynvml

SIGNS = (82, 230, 74, 269, 270, 271, 194)
ECC = (3, 5, 4, 6, 11, 22, 12, 23, 142, 143, 144, 145)
LINKS = tuple((field, link) for link in range(18) for field in (165, 161, 162, 163))
TRAFFIC = (91, 90, (138, 0xFFFFFFFF), (139, 0xFFFFFFFF))
PCIE = (94, 197, 198)


def fields(handle: Any, wanted: Any) -> list[int]:
    """Return the values of fields that are there."""
    found = pynvml.nvmlDeviceGetFieldValues(handle, list(wanted))
    of_type = {1: "uiVal", 3: "ullVal"}
    return [
        getattr(field.value, of_type.get(field.valueType, "siVal"))
        for field in found
        if field.nvmlReturn == 0
    ]


def gpu(handle: Any) -> None:
    """Read what the collector `gpu` reads every sweep."""
    fields(handle, SIGNS)
    for function in (
        pynvml.nvmlDeviceGetTotalEnergyConsumption,
        pynvml.nvmlDeviceGetComputeMode,
        pynvml.nvmlDeviceGetPersistenceMode,
        pynvml.nvmlDeviceGetEccMode,
        pynvml.nvmlDeviceGetMigMode,
        pynvml.nvmlDeviceGetMarginTemperature,
        pynvml.nvmlDeviceGetPowerUsage,
        pynvml.nvmlDeviceGetEnforcedPowerLimit,
        pynvml.nvmlDeviceGetCurrentClocksEventReasons,
        pynvml.nvmlDeviceGetUtilizationRates,
    ):
        function(handle)
    pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
    pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)


def others(handle: Any) -> None:
    """Read what the other collectors of GPUs read."""
    for wanted in (ECC, TRAFFIC, LINKS, PCIE):
        fields(handle, wanted)
    pynvml.nvmlDeviceGetSramEccErrorStatus(
        handle, ctypes.byref(pynvml.c_nvmlEccSramErrorStatus_v1_t())
    )
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(pynvml.c_nvmlGpuFabricInfo_v3_t()))
    pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
    pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    pynvml.nvmlDeviceGetMigMode(handle)


def main() -> None:
    """Print the CPU milliseconds of each sweep."""
    rounds, names = int(sys.argv[1]), sys.argv[2:]
    pynvml.nvmlInit()
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    for turn in range(rounds + 3):
        started = time.process_time_ns()
        for handle in handles:
            gpu(handle)
            if len(names) > 1:
                others(handle)
        if turn > 3:
            print((time.process_time_ns() - started) / 1e6)


if __name__ == "__main__":
    main()
