"""What a failing call of a device costs, and the most that a driver's count may be."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pynvml
import pytest

from dshealthd.core.collector import Reason, SourceError
from dshealthd.nvml import codes
from dshealthd.nvml.device import Device, ReadingEnded
from tests.jobs.machines import Clock


def device(clock: Clock) -> Device:
    """Return a device that nothing has been asked of."""
    return Device("gpu 0", None, lambda _: SourceError(Reason.NOT_LOADED, "gone"), clock)


def failing(clock: Clock, seconds: float, calls: list[float]) -> NoReturn:
    """Fail after so many seconds."""
    clock.now += seconds
    calls.append(clock.now)
    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


@pytest.mark.parametrize(("seconds", "made"), [(0.4375, 2), (0.5, 1)])
def test_call_that_fails_slowly(seconds: float, made: int) -> None:
    """After half a second a call is not made again; its failure is told again."""
    clock, calls = Clock(), list[float]()
    subject = device(clock)
    for _ in range(2):
        assert subject.perform(("call",), lambda: failing(clock, seconds, calls)) is None
        assert [fault.reason for fault in subject.pop_faults()] == [Reason.UNKNOWN_ERROR]
    assert len(calls) == made


@pytest.mark.parametrize("seconds", [0.25, 0.5])
def test_reading_ends_after_two_seconds_of_failures(seconds: float) -> None:
    """However many calls they are of; a new reading has two seconds of its own."""
    clock, calls = Clock(), list[float]()
    subject = device(clock)
    for reading in range(2):
        call = functools.partial(failing, clock, seconds, calls)
        with pytest.raises(ReadingEnded):
            any(subject.perform((reading, number), call) for number in range(100))
        assert len(calls) == (reading + 1) * 2.0 / seconds
        subject.pop_faults()


@pytest.mark.parametrize(("name", "code", "reasons"), [
    ("nvmlDeviceGetSramEccErrorStatus", 4, []),
    ("nvmlDeviceGetSramEccErrorStatus", 999, [Reason.UNKNOWN_ERROR]),
    ("nvmlDeviceGetPowerUsage", 4, [Reason.PERMISSION_DENIED]),
    ("nvmlDeviceGetPowerUsage", 3, []),
    ("nvmlDeviceGetPowerUsage", 21, []),
])  # fmt: skip
def test_what_is_no_fault(name: str, code: int, reasons: list[Reason]) -> None:
    """What is not supported, or has no data now, and a call that some drivers keep for root."""

    def refuse() -> NoReturn:
        raise pynvml.NVMLError(code)

    subject = device(Clock())
    assert subject.perform((name,), refuse) is None
    assert [fault.reason for fault in subject.pop_faults()] == reasons


@pytest.mark.parametrize(("code", "given", "listed"), [
    (pynvml.NVML_SUCCESS, 4096, 4096),
    (pynvml.NVML_SUCCESS, 4097, None),
    (pynvml.NVML_ERROR_INSUFFICIENT_SIZE, 4097, None),
])  # fmt: skip
def test_processes_are_bounded(
    monkeypatch: pytest.MonkeyPatch, code: int, given: int, listed: int | None
) -> None:
    """No list is longer than any that a GPU can have; a longer one is malformed."""

    def answer(_handle: object, count: Any, _array: ctypes.Array[Any]) -> int:
        count._obj.value = given
        return code

    library = SimpleNamespace(nvmlDeviceGetComputeRunningProcesses_v3=answer)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    subject = device(Clock())
    pids = subject.compute_processes()
    assert (None if pids is None else len(pids)) == listed
    reasons = [fault.reason for fault in subject.pop_faults()]
    assert reasons == ([] if listed else [Reason.MALFORMED])


def test_why_a_library_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is there and is refused has the loader's reason beside NVML's own text."""
    absent = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    text = "NVML says 'NVML Shared Library Not Found' (12)"
    monkeypatch.setattr(codes, "LIBRARY", "libnvidia-ml-of-no-node.so.1")
    assert codes.describe(absent) == text
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(codes, "LIBRARY", str(broken))
    assert codes.describe(absent) == f"{text}: {broken}: file too short"
    assert "file too short" not in codes.describe(pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN))
