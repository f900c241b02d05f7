"""Compute processes on a GPU, in a list of bounded length, unlike that of pynvml itself."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import pynvml

from dshealthd.nvml.values import MAX_PROCESSES

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device

_FUNCTIONS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


def compute_processes(device: Device) -> list[int] | None:
    """Return the pids of the compute processes on a GPU; None as `Device.query` does."""
    noted = len(device.notes)
    for name in _FUNCTIONS:
        answer = device.perform((name,), functools.partial(_call, name, device.handle))
        if answer is None:
            continue
        del device.notes[noted:]  # of a newer function that this driver lacks
        given, array = answer
        if device.count(name, given, MAX_PROCESSES) is None:
            return None
        return [process.pid for process in array[:given]]
    return None


def _call(name: str, handle: Any) -> tuple[int, Any]:
    """Return the number of processes that the driver gives, and the array that it has filled."""
    function = getattr(pynvml.nvmlLib, name, None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    array = (pynvml.c_nvmlProcessInfo_v2_t * MAX_PROCESSES)()  # version 3 has the same layout
    count = ctypes.c_uint(MAX_PROCESSES)
    code = function(handle, ctypes.byref(count), array)
    too_many = code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE and count.value > MAX_PROCESSES
    if code != pynvml.NVML_SUCCESS and not too_many:
        raise pynvml.NVMLError(code)
    return count.value, array
