"""NVML's field values: many readings of a device in one call.

`pynvml.nvmlDeviceGetFieldValues` builds a new array for every call and returns it as objects; both
cost more than the call. This module keeps the array, passes it to the same function of the library
that pynvml has loaded, and decodes it as bytes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import pynvml

from dshealthd.nvml import codes
from dshealthd.nvml.values import SENTINELS

if TYPE_CHECKING:
    from collections.abc import Sequence

_LAYOUT = struct.Struct("=IIqqIIQ")
"""nvmlFieldValue_t: field, scope, timestamp, latency, type, return code, value."""
if _LAYOUT.size != ctypes.sizeof(pynvml.c_nvmlFieldValue_t):
    message = "pynvml's nvmlFieldValue_t has another size than NVML's"
    raise ImportError(message)
_ANSWER = struct.Struct("=24xIIQ")
"""The same, only the driver's answer: type, return code, value."""
_AT_ONCE = 128
"""Most fields per call; drivers limit it to the number of fields that they know."""
_UNTOUCHED = pynvml.NVML_ERROR_NOT_SUPPORTED
_UINT = 0xFFFFFFFF


def decoded(kind: int, raw: int) -> float | None:
    """Return the number in a field value's union `nvmlValue_t`, or None for a sentinel, a value
    that is not finite, or an unknown type.
    """
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


class _Chunk(NamedTuple):
    """Fields that are read in one call."""

    positions: Sequence[int]
    """Position of each among the fields of its batch."""
    array: Any
    """Array that the driver fills."""
    answers: list[tuple[int, ...] | None]
    """The driver's last answer for each."""


class Batch:
    """Fields of one device that are read together.

    Unsupported fields are left out from the second reading on, and unchanged answers are not
    decoded again.
    """

    def __init__(self, fields: Sequence[tuple[int, int]]) -> None:
        """Prepare to read pairs of field and scope.

        The scope is the link's number if the field has one, else 0.
        """
        self._fields = fields
        self._function: Any = getattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        self._values: list[float | None] = [None] * len(fields)
        """The last answers, decoded."""
        self._prepare(range(len(fields)) if self._function else ())

    def _prepare(self, wanted: Sequence[int]) -> None:
        self._chunks: list[_Chunk] = []
        for start in range(0, len(wanted), _AT_ONCE):
            positions = wanted[start : start + _AT_ONCE]
            packed = b"".join(
                _LAYOUT.pack(*self._fields[position], 0, 0, 0, _UNTOUCHED, 0)
                for position in positions
            )
            array = (pynvml.c_nvmlFieldValue_t * len(positions)).from_buffer_copy(packed)
            self._chunks.append(_Chunk(positions, array, [None] * len(positions)))

    def read(self, handle: Any) -> tuple[list[float | None], int]:
        """Return a value or None for each NVML field, and the first return code that is a failure
        (0 if none).

        A code that concerns the session or the device replaces an earlier one.
        """
        failure = 0
        unsupported: set[int] = set()
        for number, chunk in enumerate(self._chunks):
            code = self._function(handle, len(chunk.positions), chunk.array)
            if code in codes.UNSUPPORTED:
                unsupported.update(chunk.positions)
            elif code:
                none = unsupported.union(*(left.positions for left in self._chunks[number:]))
                values = [None if at in none else value for at, value in enumerate(self._values)]
                return values, int(code)
            else:
                answers = [*_ANSWER.iter_unpack(chunk.array)]
                if answers == chunk.answers:
                    continue  # compared at once, as most fields change rarely
                for at, (position, answer) in enumerate(zip(chunk.positions, answers, strict=True)):
                    if answer == chunk.answers[at]:
                        continue
                    kind, own, raw = chunk.answers[at] = answer
                    self._values[position] = decoded(kind, raw) if own == 0 else None
                    if own in codes.UNSUPPORTED:
                        unsupported.add(position)
                    elif own and own not in codes.NOTHING_NOW:
                        chunk.answers[at] = None  # reported at each reading
                        if not failure or own in codes.OF_SESSION | codes.OF_DEVICE:
                            failure = own
        for position in unsupported:
            self._values[position] = None
        if unsupported:
            self._prepare(
                [
                    position
                    for chunk in self._chunks
                    for position in chunk.positions
                    if position not in unsupported
                ]
            )
        return [*self._values], failure
