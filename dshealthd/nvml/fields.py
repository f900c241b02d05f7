"""NVML's field values: many readings of a device in one call.

`pynvml.nvmlDeviceGetFieldValues` leaves a field that the driver does not touch at 0, a valid
answer, and returns objects, which cost more than the call. This module passes an array of its own
to the same function of the library that pynvml has loaded, and decodes it as bytes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

import pynvml

from dshealthd.nvml import codes
from dshealthd.nvml.values import SENTINELS

_LAYOUT = struct.Struct("=IIqqIIQ")
"""nvmlFieldValue_t: field, scope, timestamp, latency, type, return code, value."""
if _LAYOUT.size != ctypes.sizeof(pynvml.c_nvmlFieldValue_t):
    raise ImportError("pynvml's nvmlFieldValue_t has another size than NVML's")
_ANSWER = struct.Struct("=24xIIQ")
"""The same, only the driver's answer: type, return code, value."""
_AT_ONCE = 128
"""Most fields per call; drivers limit it to the number of fields that they know."""
_UNTOUCHED = pynvml.NVML_ERROR_NOT_SUPPORTED
_UINT = 0xFFFFFFFF


def decode_value(kind: int, raw: int) -> float | None:
    """Return the number in an `nvmlValue_t`; None for a sentinel, no finite value, or no type."""
    if kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return None if raw & _UINT == _UINT else raw & _UINT
    if kind in (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG):
        return None if raw in SENTINELS else raw
    if kind == pynvml.NVML_VALUE_TYPE_SIGNED_INT:
        return int(ctypes.c_int32(raw & _UINT).value)  # -1 is a valid temperature margin
    if kind == pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG:
        return int(ctypes.c_int64(raw).value)
    if kind == pynvml.NVML_VALUE_TYPE_DOUBLE:
        value: float = struct.unpack("=d", struct.pack("=Q", raw))[0]
        return value if math.isfinite(value) else None
    return None


class Batch:
    """Fields of one device that are read together, as far as the device supports them."""

    def __init__(self, fields: Sequence[tuple[int, int]]) -> None:
        """Prepare to read pairs of field and scope, which is the link's number or 0."""
        self._packed = [_LAYOUT.pack(*field, 0, 0, 0, _UNTOUCHED, 0) for field in fields]
        self._function: Any = getattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        self._supported = [*range(len(fields))] if self._function else []
        """Positions of the fields that no reading has found unsupported."""

    def read(self, handle: Any) -> tuple[list[float | None], int]:
        """Return a value or None for each NVML field, and the first return code that is a failure
        (0 if none).

        A code that concerns the session or the device replaces an earlier one.
        """
        values: list[float | None] = [None] * len(self._packed)
        failure = 0
        unsupported: set[int] = set()
        for start in range(0, len(self._supported), _AT_ONCE):
            positions = self._supported[start : start + _AT_ONCE]
            packed = b"".join([self._packed[position] for position in positions])
            array = (pynvml.c_nvmlFieldValue_t * len(positions)).from_buffer_copy(packed)
            code = self._function(handle, len(positions), array)
            if code in codes.UNSUPPORTED:
                unsupported.update(positions)
                continue
            if code:
                return values, int(code)
            for position, (kind, own, raw) in zip(
                positions, _ANSWER.iter_unpack(array), strict=True
            ):
                if own == 0:
                    values[position] = decode_value(kind, raw)
                elif own in codes.UNSUPPORTED:
                    unsupported.add(position)
                elif own not in codes.NOTHING_NOW and (
                    not failure or own in codes.OF_SESSION | codes.OF_DEVICE
                ):
                    failure = own
        if unsupported:
            self._supported = [at for at in self._supported if at not in unsupported]
        return values, failure
