"""NVML's return codes, and how a failed call is handled for each."""

from __future__ import annotations

import ctypes

import pynvml

from dshealthd.core.collector import Reason

LIBRARY = "libnvidia-ml.so.1"

UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # older drivers return this for anything unknown
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
"""Not supported by this device or driver; not tried again before the next enumeration."""

NOTHING_NOW = frozenset(
    {pynvml.NVML_ERROR_NO_DATA, pynvml.NVML_ERROR_NOT_READY, pynvml.NVML_ERROR_NOT_FOUND}
)
"""No data at present: no sample, and no fault."""

OF_SESSION = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""NVML as a whole is gone, whichever device the call was for."""

OF_DEVICE = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
    }
)
"""The device as a whole is gone, whatever the call was.

Any other failure, including a timeout or "unknown error", concerns only that call.
"""

NEED_ROOT = frozenset({"nvmlDeviceGetSramEccErrorStatus"})
"""Calls that some drivers allow only to root; if denied, they count as not supported."""

_REASONS = {
    pynvml.NVML_ERROR_UNINITIALIZED: Reason.NOT_LOADED,
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.PERMISSION_DENIED,
    pynvml.NVML_ERROR_NOT_FOUND: Reason.NOT_FOUND,
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: Reason.MALFORMED,
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: Reason.IO_ERROR,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Reason.NOT_LOADED,
    pynvml.NVML_ERROR_TIMEOUT: Reason.TIMEOUT,
    pynvml.NVML_ERROR_IRQ_ISSUE: Reason.IO_ERROR,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Reason.NOT_FOUND,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Reason.MALFORMED,
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: Reason.IO_ERROR,
    pynvml.NVML_ERROR_GPU_IS_LOST: Reason.GPU_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Reason.RESET_REQUIRED,
    # "the operating system or a cgroup has blocked the request"
    pynvml.NVML_ERROR_OPERATING_SYSTEM: Reason.PERMISSION_DENIED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Reason.VERSION_MISMATCH,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Reason.NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: Reason.NOT_FOUND,  # on a lookup: no GPU has this index
}


def reason_of_code(code: int) -> Reason:
    """Return the reason for an NVML code; UNKNOWN_ERROR for any code not listed."""
    return _REASONS.get(code, Reason.UNKNOWN_ERROR)


def describe(error: pynvml.NVMLError) -> str:
    """Return NVML's text and code, and why a library cannot be loaded, which pynvml drops."""
    text = f"NVML says {str(error).rstrip('.')!r} ({error.value})"
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and (problem := _refused(LIBRARY)):
        text += f": {problem}"
        if "GLIBC_" in problem:
            text += (
                "; the driver needs a newer C library than this dshealthd brings: upgrade dshealthd"
            )
    return text


def _refused(library: str) -> str:
    """Return why the loader refuses a library; nothing if it is absent or can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        problem = str(error)
        return "" if problem.startswith(f"{library}: cannot open") else problem
    return ""
