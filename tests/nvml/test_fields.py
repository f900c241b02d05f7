"""Field values as bytes, and the numbers that mean that there is none."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.nvml.fields import Batch, decode_value
from dshealthd.nvml.values import SENTINELS

DOUBLE, UINT, ULONG, ULL, SLL, SINT = range(6)


def bits(value: float) -> int:
    """Return a double's bits."""
    raw: int = struct.unpack("=Q", struct.pack("=d", value))[0]
    return raw


@pytest.mark.parametrize(("kind", "raw", "value"), [
    (UINT, 0xDEADBEEF_00000007, 7),
    (UINT, 0xFFFFFFFF, None),
    (UINT, 0xDEADBEEF_FFFFFFFF, None),
    (ULL, 2**40, 2**40),
    (ULL, 2**64 - 1, None),
    (ULONG, 2**64 - 1, None),
    (SINT, 0xFFFFFFFE, -2),
    (SINT, 0xFFFFFFFF, -1),
    (SLL, 2**64 - 5, -5),
    (DOUBLE, bits(1.5), 1.5),
    (DOUBLE, bits(math.nan), None),
    (DOUBLE, bits(math.inf), None),
    (99, 1, None),
])  # fmt: skip
def test_decoded(kind: int, raw: int, value: float | None) -> None:
    """Each type takes its own bits of the union."""
    assert decode_value(kind, raw) == value


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_decoded_is_a_number_or_nothing(kind: int, raw: int) -> None:
    """Whatever the driver writes, the answer is finite or None."""
    value = decode_value(kind, raw)
    assert value is None or math.isfinite(value)


@pytest.mark.parametrize("codes", [(3, 999), (0, 999), (999,)])
def test_no_value_of_before_is_given_for_a_failed_call(codes: tuple[int, ...]) -> None:
    """Where one call of two is not supported or fails, its fields have no value in this reading."""
    batch = Batch([(field, 0) for field in range(1, 201)])
    pending: list[int] = []

    def call(_handle: object, count: int, array: ctypes.Array[Any]) -> int:
        for at in range(count):
            array[at].nvmlReturn, array[at].valueType = 0, UINT
            array[at].value.uiVal = 7
        return pending.pop(0) if pending else 0

    batch._function = call
    batch._supported = [*range(200)]
    assert batch.read(None) == ([7] * 200, 0)
    pending.extend(codes)
    values, failure = batch.read(None)
    assert failure == 999
    assert values == [7] * (128 if codes[0] == 0 else 0) + [None] * (72 if codes[0] == 0 else 200)
    assert batch.read(None) == ([7] * 200, 0)


@pytest.mark.parametrize(("codes", "failure"), [
    ((0, 0), 0),
    ((pynvml.NVML_ERROR_NO_DATA, 0), 0),
    ((999, pynvml.NVML_ERROR_NO_DATA), 999),
    ((999, pynvml.NVML_ERROR_TIMEOUT), 999),
    ((999, pynvml.NVML_ERROR_GPU_IS_LOST), pynvml.NVML_ERROR_GPU_IS_LOST),
    ((999, pynvml.NVML_ERROR_DRIVER_NOT_LOADED), pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
])  # fmt: skip
def test_which_failure_of_a_field_counts(codes: tuple[int, int], failure: int) -> None:
    """The first, unless a later one concerns the device or the session; no data is none."""
    batch = Batch([(1, 0), (2, 0)])

    def call(_handle: object, _count: int, array: ctypes.Array[Any]) -> int:
        for field, code in zip(array, codes, strict=True):
            field.nvmlReturn, field.valueType, field.value.uiVal = code, UINT, 7
        return 0

    batch._function, batch._supported = call, [0, 1]
    assert batch.read(None) == ([None if code else 7 for code in codes], failure)


def test_constants_of_pynvml() -> None:
    """The values that are written out here, as collectors do without pynvml, are pynvml's."""
    types = "DOUBLE UNSIGNED_INT UNSIGNED_LONG UNSIGNED_LONG_LONG SIGNED_LONG_LONG SIGNED_INT"
    for number, name in enumerate(types.split()):
        assert getattr(pynvml, f"NVML_VALUE_TYPE_{name}") == number
    absent = pynvml.NVML_VALUE_NOT_AVAILABLE_uint, pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong
    assert {one.value for one in absent} == SENTINELS
