"""An NVML device, called by the names of pynvml's functions and constants.

The names are text so that collectors can be declared without pynvml. If pynvml or the driver lacks
one, the device counts as not supporting it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pynvml

from dshealthd.core.collector import Fault, NotAvailable, Reason, Sample, SourceError
from dshealthd.core.text import plural
from dshealthd.nvml import codes
from dshealthd.nvml.fields import Batch
from dshealthd.nvml.values import MAX_PROCESSES, Fields, number

T = TypeVar("T")

Call = tuple[object, ...]
"""A function of NVML, and what tells its calls apart: of those that pynvml makes, their arguments
after the handle, of which a text is the name of a pynvml constant.
"""
_SLOW = 0.5
"""Seconds. A failing call that takes longer has waited for the driver's own timeout.

It is skipped until the GPUs are listed again, so that it does not delay every sweep.
"""
_SPENT_AT_MOST = 2.0
"""Seconds that failing calls may take in one reading: far below a collector's deadline (10 s).

Past the deadline the worker would be killed and the whole GPU quarantined because of one call.
"""
_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


class DeviceError(SourceError):
    """The device as a whole cannot be read: NVML says so, or no vital call answers."""


class ReadingEnded(Exception):
    """Failing calls took too long; earlier readings stay valid, and the notes say why."""


@functools.cache
def _named(name: str | int) -> Any:
    """Return the pynvml attribute of this name, None if it is lacking; numbers unchanged."""
    return getattr(pynvml, name, None) if isinstance(name, str) else name


def _processes(name: str, handle: Any) -> tuple[int, Any]:
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


@dataclass(eq=False)
class Device:
    """A handle, and the calls known not to work on it. Lives until the next enumeration."""

    part: str
    handle: Any
    session_ended: Callable[[pynvml.NVMLError], SourceError | NotAvailable]
    """Makes the error to raise when NVML as a whole is gone."""
    monotonic: Callable[[], float]
    notes: list[Fault] = field(default_factory=list)
    """Single calls that failed since `pop_faults`; their values are missing."""
    _spent: list[float] = field(default_factory=list)
    _slow: dict[object, Fault] = field(default_factory=dict)
    _calls: dict[Call, Callable[[], Any] | None] = field(default_factory=dict)
    """Prepared; None for those that this device or pynvml does not support."""
    _constants: dict[Call, Any] = field(default_factory=dict)
    _without_data: int = 0
    """Calls so far that had no data at present."""

    def query(self, *call: str | int) -> Any:
        """Return the result of a pynvml function for this device, or None if it has none.

        DeviceError if the device is gone, SourceError or NotAvailable if NVML is. Any other failure
        is noted and returns None; ReadingEnded once such failures took too long.
        """
        if call not in self._calls:
            function, *arguments = map(_named, call)
            self._calls[call] = (
                None
                if None in (function, *arguments)
                else functools.partial(function, self.handle, *arguments)
            )
        prepared = self._calls[call]
        value = None if prepared is None else self.perform(call, prepared)
        return number(value) if value.__class__ is int else value

    def first(self, *calls: tuple[str, ...]) -> Any:
        """Return the first result that these pynvml calls give for this device, or None.

        List newer names before older ones. A failure is not a fault if a later call succeeds.
        """
        noted = len(self.notes)
        for call in calls:
            if (value := self.query(*call)) is not None:
                # Old names fail on new drivers, and new names on old drivers.
                del self.notes[noted:]
                return value
        return None

    def once(self, *call: str | int) -> Any:
        """Return the first result of `query`, for what is constant between enumerations."""
        return self.keep(call, lambda: self.query(*call))

    def keep(self, key: Call, make: Callable[[], Any]) -> Any:
        """Return the first result of `make` for this device that was not None."""
        value = self._constants.get(key)
        if value is None and (value := make()) is not None:
            self._constants[key] = value
        return value

    def constants(self, name: str, make: Callable[[], Iterable[Sample]]) -> Iterator[Sample]:
        """Yield samples that are constant between enumerations: made again only after a call of
        theirs failed or had no data. They are a sixth of a sweep's CPU.
        """
        if (kept := self._constants.get((name,))) is not None:
            yield from kept
            return
        before = len(self.notes), self._without_data
        made = []
        for sample in make():
            made.append(sample)
            yield sample
        if before == (len(self.notes), self._without_data):
            self._constants[name,] = made

    def count(self, what: str, value: float | None, most: int) -> int | None:
        """Return a driver's count; one that is no whole number from 0 to `most` is noted: None."""
        if value is None:
            return None
        if not 0 <= value <= most or value != int(value):
            self._record(Reason.MALFORMED, f"{what}: {value} is no count from 0 to {most}")
            return None
        return int(value)

    def fill(self, function: str, structure: str) -> Any:
        """Return a pynvml structure that a function fills by reference; None as `query` does."""
        fill, kind = _named(function), _named(structure)
        if fill is None or kind is None:
            return None
        filled = kind()
        code = self.perform((function, structure), lambda: fill(self.handle, ctypes.byref(filled)))
        return None if code is None else filled

    def perform(self, key: Call, call: Callable[[], T]) -> T | None:
        """Return the result of a call of the NVML function that `key` names, for this device.

        None as `query` does. For functions with more than a handle and a result.
        """
        if (fault := self._slow.get(key)) is not None:
            self.notes.append(fault)
            return None
        if self._calls.get(key, call) is None:
            return None
        started = self.monotonic()
        try:
            return call()
        except pynvml.NVMLError as error:
            self._failed(error, key, started)
        except UnicodeDecodeError as error:
            self._record(Reason.MALFORMED, f"{key[0]}: {error}")
        return None

    def address(self) -> str:
        """Return this device's PCI address, as the kernel writes it; empty if it is unknown."""
        pci = self.once("nvmlDeviceGetPciInfo_v3")
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci else ""

    def compute_processes(self) -> list[int] | None:
        """Return the pids of the compute processes on this device; None as `query` does.

        pynvml's own function allocates whatever length the driver gives, twice over.
        """
        noted = len(self.notes)
        for name in _PROCESSES:
            answer = self.perform((name,), functools.partial(_processes, name, self.handle))
            if answer is None:
                continue
            del self.notes[noted:]  # of a newer function that this driver lacks
            given, array = answer
            if self.count(name, given, MAX_PROCESSES) is None:
                return None
            return [process.pid for process in array[:given]]
        return None

    def inforom_valid(self) -> bool | None:
        """Return whether the infoROM is usable, None if the device does not report it.

        Uses the checksum of its configuration, which the driver keeps; `nvmlDeviceValidateInforom`
        would read the flash.
        """

        def read() -> bool:
            try:
                pynvml.nvmlDeviceGetInforomConfigurationChecksum(self.handle)
            except pynvml.NVMLError_CorruptedInforom:
                return False
            return True

        return self.perform(("nvmlDeviceGetInforomConfigurationChecksum",), read)

    def fields(self, fields: Fields) -> list[float | None]:
        """Return the value of each field of this device, None if it has none, in one call."""
        # A name that this pynvml lacks becomes field 0, which no driver supports.
        batch: Batch = self.keep(
            (fields,), lambda: Batch([(_named(name) or 0, scope) for name, scope in fields.fields])
        )
        values: list[float | None] = [None] * len(fields.fields)

        def read() -> None:
            values[:], failure = batch.read(self.handle)
            if failure:
                raise pynvml.NVMLError(failure)

        self.perform(("nvmlDeviceGetFieldValues", fields), read)
        return values

    def of(self, handle: Any) -> Device:
        """Return a part of this device: a MIG device, whose failures count as this device's."""
        # Notes and time are shared: seven slow MIG devices get the budget of one GPU.
        device = self.session_ended, self.monotonic, self.notes, self._spent
        return Device(self.part, handle, *device)

    def pop_faults(self) -> list[Fault]:
        """Return this device's failures since the last call: one fault per reason."""
        by_reason: dict[Reason, list[Fault]] = {}
        for note in self.notes:
            by_reason.setdefault(note.reason, []).append(note)
        self.notes.clear()
        self._spent.clear()
        return [
            first._replace(detail=f"{first.detail}; {plural(len(more), 'more call')} failed")
            if more
            else first
            for first, *more in by_reason.values()
        ]

    def _failed(self, error: pynvml.NVMLError, key: Call, started: float) -> None:
        """Handle a failed NVML call: it may concern the call, the device, or NVML as a whole."""
        code, name = error.value, key[0]
        if code in codes.UNSUPPORTED or (
            code == pynvml.NVML_ERROR_NO_PERMISSION and name in codes.NEED_ROOT
        ):
            # Skipped until the GPUs are listed again: support does not appear later.
            self._calls[key] = None
        elif code in codes.OF_SESSION:
            raise self.session_ended(error) from error
        elif code in codes.OF_DEVICE:
            raise DeviceError(
                codes.reason_of_code(code), f"{name}: {codes.describe(error)}"
            ) from error
        elif code in codes.NOTHING_NOW:
            self._without_data += 1
        else:
            self._record(codes.reason_of_code(code), f"{name}: {codes.describe(error)}")
            took = self.monotonic() - started
            self._spent.append(took)
            if took >= _SLOW:
                self._slow[key] = self.notes[-1]
            if sum(self._spent) >= _SPENT_AT_MOST:
                raise ReadingEnded

    def _record(self, reason: Reason, detail: str) -> None:
        self.notes.append(Fault(self.part, reason, detail))


@dataclass
class Gpu:
    """One position in NVML's list."""

    index: int
    uuid: str
    """Empty if it was never known in this session."""
    device: Device | None = None
    """None if the GPU could not be opened."""
    fault: Fault | None = None
    """Why it cannot be read in this sweep."""
    energy: float | None = None
    """Millijoules since the driver was loaded, as of this sweep."""
    looked_at: bool = False
    quarantined: bool = False
    """The fault is that a worker hung or crashed on it, so it is skipped."""

    @property
    def part(self) -> str:
        """The GPU's name in faults and deadlines."""
        return f"gpu {self.index}"

    @functools.cached_property  # used for every sample; the UUID is set before the first reading
    def labels(self) -> tuple[str, str]:
        """Values of the GPU's labels `gpu` and `uuid`."""
        return str(self.index), self.uuid
