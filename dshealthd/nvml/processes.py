"""Compute processes on a GPU, from NVML, in a list of bounded length.

pynvml's own function allocates whatever length the driver gives, twice over.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import pynvml

from dshealthd.nvml.values import MAX_PROCESSES

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device

_FUNCTIONS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
_ROOM = 64
"""Processes for which there is room in the first call; a GPU rarely has more."""


class _Answer(NamedTuple):
    """The driver's answer: the number of processes, the most it may be, and the array it filled."""

    given: int
    most: int
    array: Any


def compute_processes(device: Device) -> list[int] | None:
    """Return the pids of the compute processes on a GPU; None as `Device.query` does."""
    noted = len(device.notes)
    for name in _FUNCTIONS:
        answer = device.perform(name, functools.partial(_call, name, device.handle))
        if answer is None:
            continue
        del device.notes[noted:]  # of a newer function that this driver lacks
        if device.count(name, answer.given, answer.most) is None:
            return None
        return [process.pid for process in answer.array[: answer.given]]
    return None


def _call(name: str, handle: Any) -> _Answer:
    function = getattr(pynvml.nvmlLib, name, None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    for room in (_ROOM, MAX_PROCESSES):
        array = (pynvml.c_nvmlProcessInfo_v2_t * room)()  # version 3 has the same layout
        count = ctypes.c_uint(room)
        code = function(handle, ctypes.byref(count), array)
        if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
            break
    else:
        if count.value > room:
            return _Answer(count.value, room, array)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return _Answer(count.value, room, array)
